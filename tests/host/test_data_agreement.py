"""Random data sets given to the host and to the check: both refuse, or both keep the same number of rows."""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamafactory_ascend.checks.data import catalogue
from llamafactory_ascend.checks.data.check import Request, check
from llamafactory_ascend.checks.data.problem import Limits
from llamafactory_ascend.host import data

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from llamafactory.data import loader, parser  # noqa: E402

TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "call",
    "system_tag": "system",
}
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
CALLS = ["f", '{"name": "f", "arguments": {}}']
WRONG_MESSAGES = [
    {"role": "user"},
    {"content": "x"},
    {"role": "bot", "content": "x"},
    {"role": "user", "content": None},
    {"role": "user", "content": 3},
    {"role": "tool", "content": "x"},
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Rows:
    """Rows that are sound, but for some with one of the mistakes people make."""

    def __init__(self, seed: int) -> None:
        self.stream = random.Random(seed)
        self.rate = self.stream.choice([0, 0.05, 0.2])

    def rarely(self) -> bool:
        return self.stream.random() < self.rate

    def either(self, usual: Any, *rare: Any) -> Any:
        return self.stream.choice(rare) if self.rarely() else usual

    def alpaca(self) -> dict[str, Any]:
        row = {
            "instruction": self.either("q", "", None, 3, ["x"]),
            "input": self.either("", None, "x"),
            "output": self.either("a", "", None, 1, ["x"]),
        }
        if self.rarely():
            turns = [["a", "b"]], [], None, [["a"]], [["a", "b", "c"]], "x", [["a", None]]
            row["history"] = self.stream.choice(turns)
        if self.rarely():
            row["extra"] = self.stream.choice([1, "x", [1], ["x"], {"a": 1}, None, True, 1.5])
        if self.rarely():
            row.pop(self.stream.choice(list(row)))
        return row

    def chat(self) -> dict[str, Any]:
        roles = ["user", "assistant"] * self.stream.choice([1, 1, 2, 3])
        messages: list[dict[str, Any]] = [{"role": role, "content": "c"} for role in roles]
        if self.stream.random() < 0.2:
            messages.insert(0, {"role": "system", "content": "s"})
        if self.rarely():
            messages.pop()
        if self.rarely():
            messages.insert(1, {"role": "tool", "content": "o"})
        if self.rarely() and messages:
            messages[0] = self.stream.choice(WRONG_MESSAGES)
        if self.rarely() and len(messages) > 1:
            messages[1] = {
                "role": self.stream.choice(["call", "user", "system", "tool"]),
                "content": self.stream.choice(CALLS),
            }
        return {"messages": self.either(messages, [], None, "x")}


def kept_by_host(encoder: data.Encoder, name: str, entry: dict[str, Any], folder: Path) -> int:
    """Return how many rows the host trains on; 0 where it stops, as it does where none is left."""
    arguments = SimpleNamespace(
        dataset_dir=str(folder),
        media_dir=str(folder),
        streaming=False,
        max_samples=None,
        overwrite_cache=True,
        preprocessing_num_workers=None,
    )
    try:
        (attribute,) = parser.get_dataset_list([name], {name: entry})
        rows = loader._load_single_dataset(
            attribute,
            SimpleNamespace(cache_dir=str(folder / "cache"), hf_hub_token=None),
            arguments,
            SimpleNamespace(local_process_index=0, dataloader_num_workers=0),
        )
        processor = loader._get_dataset_processor(
            encoder.data_args, "sft", encoder.template, encoder.tokenizer, None
        )
        batch = processor.preprocess_dataset({key: rows[key] for key in rows.column_names})
    except Exception:
        return 0
    return len(batch.get("input_ids", []))


def test_host_and_check_agree(assets: Path, tmp_path: Path) -> None:
    encoder = data.load_encoder(str(assets / "qwen3"), "qwen3_nothink", 64, False, tmp_path)
    outcomes = []
    for seed in range(60):
        drawn = Rows(seed)
        formatting = drawn.stream.choice(["alpaca", "sharegpt", "openai"])
        make = drawn.alpaca if formatting == "alpaca" else drawn.chat
        rows = [make() for _ in range(drawn.stream.randint(1, 5))]
        columns = COLUMNS if formatting == "alpaca" else {"messages": "messages"}
        if formatting == "alpaca" and drawn.stream.random() < 0.4:
            columns = {**columns, "history": "history"}
        entry = {"file_name": f"{seed}.json", "formatting": formatting, "columns": columns, "tags": TAGS}
        lines = drawn.stream.random() < 0.5
        text = "\n".join(json.dumps(row) for row in rows) if lines else json.dumps(rows)
        (tmp_path / f"{seed}.json").write_text(text)
        (tmp_path / "dataset_info.json").write_text(json.dumps({"x": entry}))

        found = catalogue.read(catalogue.sources(tmp_path)).find("x")
        verdict = check(found, Request(limits=Limits(dropped=1, empty=1)))
        errors = [problem.message for problem in verdict.problems if problem.level == "error"]
        ours, host = 0 if errors else verdict.kept, kept_by_host(encoder, "x", entry, tmp_path)
        assert ours == host, (seed, errors, entry, rows)
        outcomes.append(host == len(rows) if host else None)
    assert min(outcomes.count(kind) for kind in (True, False, None)) >= 3, (
        "all kept, some, none: all were seen"
    )
