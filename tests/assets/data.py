"""Data sets of random English words, one folder each in LLaMA-Factory's `dataset_dir` layout.

`data` holds tiny, tiny_mm, long (sft), tiny_dpo, tiny_kto and tiny_pt; `vlm_data` holds tiny_mm again
with larger pictures. Image paths are relative, the host looks for them in `dataset_dir`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

DATA_FOLDERS = ("data", "vlm_data")

# fmt: off
WORDS = [
    "the", "a", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "sum", "of", "numbers", "is",
    "equal", "to", "what", "how", "many", "apples", "are", "in", "basket", "translate", "following",
    "sentence", "into", "french", "please", "write", "short", "poem", "about", "sea",
]
# fmt: on

# (height, width) in pixels; with patches of 14 and a merge of 2 that is 2 x 3 and 12 x 16 image tokens
SMALL_IMAGE = (56, 84)
LARGE_IMAGE = (336, 448)

Row = dict[str, Any]

CHAT_COLUMNS: Row = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}
DATASETS: dict[str, Row] = {
    "tiny": {},
    "tiny_mm": CHAT_COLUMNS,
    "long": {},
    "tiny_dpo": {
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
    },
    "tiny_kto": {
        "columns": {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "label"},
    },
    "tiny_pt": {"columns": {"prompt": "text"}},
}


@dataclass(frozen=True)
class SftRows:
    """The rows drawn from one random stream: their order is part of what they are."""

    tiny: list[Row]
    tiny_mm: list[Row]
    long: list[Row]


def sft_rows() -> SftRows:
    """64 short pairs, 16 picture questions and 16 pairs of 200 + 800 words."""
    stream = random.Random(0)

    def words(count: int) -> str:
        return " ".join(stream.choices(WORDS, k=count))

    def pair(question: str, answer: str) -> Row:
        return {"instruction": question, "input": "", "output": answer}

    tiny = [pair(words(stream.randint(4, 12)) + "?", words(stream.randint(10, 40))) for _ in range(64)]
    tiny_mm = [
        {
            "messages": [
                {"role": "user", "content": "<image>what is in the picture?"},
                {"role": "assistant", "content": words(20)},
            ],
            "images": [f"im{index}.png"],
        }
        for index in range(16)
    ]
    long = [pair(words(200), words(800)) for _ in range(16)]
    return SftRows(tiny, tiny_mm, long)


def preference_rows() -> dict[str, list[Row]]:
    """32 rows each: tiny_dpo (chosen, rejected), tiny_kto (every other label true), tiny_pt (plain text)."""
    stream = random.Random(1)

    def words(low: int, high: int) -> str:
        return " ".join(stream.choices(WORDS, k=stream.randint(low, high)))

    def question() -> Row:
        return {"instruction": words(4, 12) + "?", "input": ""}

    return {
        "tiny_dpo": [{**question(), "chosen": words(10, 30), "rejected": words(10, 30)} for _ in range(32)],
        "tiny_kto": [{**question(), "output": words(10, 30), "label": index % 2 == 0} for index in range(32)],
        "tiny_pt": [{"text": words(20, 60)} for _ in range(32)],
    }


def write_data(root: Path, names: Iterable[str]) -> None:
    """Write the named folders of `DATA_FOLDERS` into `root`."""
    sft = sft_rows()
    for name in names:
        if name == "vlm_data":
            _write_folder(root / name, {"tiny_mm": sft.tiny_mm}, LARGE_IMAGE)
        else:
            rows = {"tiny": sft.tiny, "tiny_mm": sft.tiny_mm, "long": sft.long, **preference_rows()}
            _write_folder(root / name, rows, SMALL_IMAGE)


def _write_folder(folder: Path, datasets: dict[str, list[Row]], image_size: tuple[int, int]) -> None:
    folder.mkdir()
    for name, rows in datasets.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    info = {name: {"file_name": f"{name}.json", **DATASETS[name]} for name in datasets}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
    for seed, row in enumerate(datasets["tiny_mm"]):
        pixels = np.random.RandomState(seed).randint(0, 255, (*image_size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / row["images"][0])
