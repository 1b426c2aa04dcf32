"""The batches of packed samples: position ids as long as the rows they belong to."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from llamafactory_ascend import run
from llamafactory_ascend.patching import Patch, Target


def collate(original: Callable[..., Any], collator: Any, features: list[dict[str, Any]]) -> Any:
    """Lengthen position ids to their rows, by zeros, as the host numbers padding.

    A packed row has `cutoff_len` tokens. The collator adds a placeholder image to it where the template knows
    images, and pads it to a multiple of 8; the position ids of the data set stay as they are.
    """
    batch = original(collator, features)
    if run.current().arguments is not None and "position_ids" in batch and "input_ids" in batch:
        batch["position_ids"] = lengthen(batch["position_ids"], batch["input_ids"].shape[-1])
    return batch


def lengthen(position_ids: Tensor, tokens: int) -> Tensor:
    """Return [..., tokens] position ids, zeros at the end; those that are long enough as they are."""
    missing = tokens - position_ids.shape[-1]
    return F.pad(position_ids, (0, missing)) if missing > 0 else position_ids


PATCHES = [
    Patch(
        id="data.packed_positions",
        targets=(Target("llamafactory.data.collator", "MultiModalDataCollatorForSeq2Seq.__call__"),),
        around=collate,
        parameters=("self", "features"),
        tested={"55c4386ea89e": "0.9.5", "2eee665a880f": "0.9.6.dev0"},
        why=(
            "Packed rows of a text model are padded, or get a placeholder image, without their position ids: "
            "the first step ends with an error of shapes (0.9.6.dev0: with flash attention only)."
        ),
        remove_when="the host lengthens position ids in every case",
        upstream="https://github.com/hiyouga/LlamaFactory/issues/10737",
    ),
]
