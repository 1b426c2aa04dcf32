"""The largest batch a recipe allows, made of a data set's own rows."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from llamafactory_ascend.features.gradient_callback import TOKEN_IDS, token_ids

IGNORED = -100  # label of a position that is not learnt from
IDS = "input_ids"  # and chosen_input_ids, rejected_input_ids, kl_input_ids
MEDIA = ("images", "videos", "audios")  # columns

Row = dict[str, Any]


def media_ids(config: Any) -> list[int]:
    """Return the ids that stand for pieces of a picture, a video or a sound in a model's inputs."""
    return [token for names in TOKEN_IDS.values() for token in token_ids(config, names)]


def fullest(rows: Any, count: int, media: Sequence[int]) -> list[Row]:
    """Return the rows with the most placeholders of media, and of equal ones the first.

    Args:
        rows: a data set or a list; it is repeated where it has fewer than ``count``.
        media: what to count; none where all rows are alike.
    """
    order = list(range(len(rows)))
    if media:
        keys = [key for key in rows[0] if key.endswith(IDS)]
        only = rows.select_columns(keys).with_format("numpy") if hasattr(rows, "select_columns") else rows
        counts = [count_media(row, media) for row in only]
        order.sort(key=lambda place: -counts[place])
    return [dict(rows[place]) for place in islice(cycle(order), count)]


def lengthen(row: Row, length: int, pad: int) -> Row:
    """Return a row as long as the recipe lets one be: its own tokens, then those of its answer over and over.

    What is appended is attended to and learnt from, because a real row of this length may be. The last
    position alone is padding, as in most batches, so that the attention mask exists that comes with it. Rows
    that are packed have their full length already.

    Args:
        length: `cutoff_len`.
        pad: id of the padding.
    """
    full = dict(row)
    if "position_ids" in row:
        return full
    has_media = any(row.get(name) for name in MEDIA)
    for key in [key for key in row if key.endswith(IDS)]:
        prefix = key.removesuffix(IDS)
        ids = list(row[key])
        room = length - 1 - len(ids)
        if room < 0 and has_media:
            continue  # a placeholder that is cut off would leave its picture without a place
        labels = list(row.get(f"{prefix}labels", ids))
        learnt = [token for token, label in zip(ids, labels, strict=True) if label != IGNORED] or ids
        more = list(islice(cycle(learnt), max(room, 0)))
        full[key] = [*ids[: length - 1], *more, pad]
        if f"{prefix}labels" in row:
            full[f"{prefix}labels"] = [*labels[: length - 1], *more, IGNORED]
        if f"{prefix}attention_mask" in row:
            mask = list(row[f"{prefix}attention_mask"])
            full[f"{prefix}attention_mask"] = [*mask[: length - 1], *([1] * len(more)), 0]
    return full


def count_media(row: Mapping[str, Any], media: Sequence[int]) -> int:
    """Return how many tokens of a row, or of a batch on any device, stand for media."""
    ids = [torch.as_tensor(value).cpu() for key, value in row.items() if key.endswith(IDS)]
    return sum(int(np.isin(part, media).sum()) for part in ids)


def count_tokens(batches: Iterable[Mapping[str, Any]]) -> int:
    """Return how many tokens batches hold, padding included."""
    return sum(value.numel() for batch in batches for key, value in batch.items() if key.endswith(IDS))
