"""The host's tokenizer with a short way to its ids: the same Rust object, without offsets and wrapping."""

from typing import Any

from llamafactory_ascend.host.data import Ids

COMPARED = 50  # texts that are encoded both ways before the short one is trusted


class QuickTokenizer:
    """Stands in for a tokenizer where a template encodes text; everything else is the tokenizer's own.

    A tokenizer without a Rust object, or one whose own ``encode`` gives other ids, keeps the long way.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._fast = getattr(self._backend, "encode_batch_fast", None)
        self._compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def encode(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Ids:
        """Return the ids of a text."""
        if self._fast is None or add_special_tokens or kwargs:
            return self._slowly(text, add_special_tokens, **kwargs)
        if self._compared >= COMPARED:
            return self._quickly(text)
        # The long way first: it sets what the Rust object does with special tokens, truncation and padding.
        found = self._slowly(text, add_special_tokens)
        self._compared += 1
        if self._quickly(text) != found:
            self._fast = None
        return found

    def _slowly(self, text: str, add_special_tokens: bool, **kwargs: Any) -> Ids:
        found: Ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **kwargs)
        return found

    def _quickly(self, text: str) -> Ids:
        assert self._fast is not None
        found: Ids = self._fast([text], add_special_tokens=False)[0].ids
        return found
