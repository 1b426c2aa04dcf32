"""JSON as Python reads it, and rows as the host's reader does, which refuses more; mistakes have a place."""

import json
import re
from typing import Any

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Decoder(json.JSONDecoder):
    """A decoder whose every failure is a JSONDecodeError: nesting and digits beyond Python's limits too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(strict=False, **options)  # a tab inside a string is no error to the host

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        try:
            return super().raw_decode(s, idx)
        except json.JSONDecodeError:
            raise
        except RecursionError:
            raise json.JSONDecodeError("Nested too deeply", s, idx) from None
        except ValueError as error:
            raise json.JSONDecodeError(str(error).partition(";")[0], s, idx) from None


class RowDecoder(Decoder):
    """Refuses what Arrow refuses and Python takes: a key twice in one object, half a surrogate pair."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_object)

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        value, end = super().raw_decode(s, idx)
        escape = SURROGATE.search(s, idx, end)
        if escape:
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise json.JSONDecodeError("Half a surrogate pair", s, escape.start()) from None
        return value, end


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"The key `{twice}` stands twice in one object")
    return made


DECODER = Decoder()
ROWS = RowDecoder()
