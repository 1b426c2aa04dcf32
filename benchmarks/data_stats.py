"""`data stats` against the host's own preprocessing: rows per second, and memory as the rows grow in number.

See benchmarks/README.md. The rows are random English words from a fixed seed; template and tokenizer are
those of a tiny Qwen3 of tests.assets. Both sides count in as many processes, one after the other.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import assets  # noqa: E402
from tests.assets.data import WORDS  # noqa: E402

MODEL, TEMPLATE, CUTOFF = "qwen3", "qwen3_nothink", 128
REQUIRED = {"rows_per_second_ratio": (1.0, float("inf")), "peak_growth": (0, 1.1)}
EVERY = 0.1  # seconds between two looks at the memory
console = Console(stderr=True, highlight=False)

# What `llamafactory-cli train` does before it loads its model, without the plugin.
HOST = """
import json, sys, time
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments, ModelArguments
from llamafactory.model import load_tokenizer
from transformers import Seq2SeqTrainingArguments

model, template, cutoff, folder, workers = sys.argv[1:]
model_args = ModelArguments(model_name_or_path=model, cache_dir=folder + "/cache")
data_args = DataArguments(
    template=template, cutoff_len=int(cutoff), dataset="rows", dataset_dir=folder,
    preprocessing_num_workers=int(workers),
)
training_args = Seq2SeqTrainingArguments(output_dir=folder + "/out", use_cpu=True, report_to="none")
module = load_tokenizer(model_args)
made = get_template_and_fix_tokenizer(module["tokenizer"], data_args)
begun = time.monotonic()
rows = get_dataset(made, model_args, data_args, training_args, "sft", **module)["train_dataset"]
seconds = time.monotonic() - begun
tokens = sum(len(ids) for batch in rows.select_columns("input_ids").iter(1000) for ids in batch["input_ids"])
print(json.dumps({"rows": len(rows), "tokens_kept": tokens, "seconds": seconds}))
"""


def write_rows(folder: Path, count: int) -> None:
    """Write `rows`: questions of 4 to 24 words, answers of 10 to 80."""
    stream = random.Random(0)
    folder.mkdir()
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as handle:
        for _ in range(count):
            question, answer = (
                " ".join(stream.choices(WORDS, k=stream.randint(*size))) for size in ((4, 24), (10, 80))
            )
            handle.write(json.dumps({"instruction": question, "input": "", "output": answer}) + "\n")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))


def run(command: list[str], **environment: str) -> tuple[dict[str, Any], float]:
    """Run a command; return the JSON that ends its stdout, and its largest memory in MiB.

    Memory is the sum of the proportional set sizes of the process and its children, so that what they share
    counts once, and of anonymous memory alone: pages of libraries count less where others use them too.
    """
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    peak = 0.0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, env=variables, cwd=ROOT)
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(EVERY)
        out.seek(0)
        text = out.read()
    if process.returncode:
        raise SystemExit(f"{command[:4]} ended with code {process.returncode}")
    return json.loads(text[text.rindex("\n{") if "\n{" in text else text.index("{") :]), peak


def memory(parent: int) -> float:
    """Return the MiB of anonymous memory of a process and all below; 0 where one began or ended meanwhile.

    What a process shares with one that it starts would count twice between the two looks.
    """
    processes, total = family(parent), 0.0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1]) / 1024
    return total if family(parent) == processes else 0.0


def family(parent: int) -> list[int]:
    """Return a process and all below it."""
    found = [parent]
    for process in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{process}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def measure(rows: int, workers: int, work: Path) -> dict[str, Any]:
    """Measure both and return the figures."""
    assets.build(work / "assets", [MODEL])
    model = str(work / "assets" / MODEL)
    found: dict[int, tuple[dict[str, Any], float]] = {}
    for count in (rows // 10, rows):
        folder = work / f"rows{count}"
        write_rows(folder, count)
        command = [str(Path(sys.executable).with_name("llamafactory-ascend")), "data", "stats", "rows"]
        command += ["--model", model, "--template", TEMPLATE, "--cutoff-len", str(CUTOFF)]
        command += ["--dataset-dir", str(folder), "--workers", str(workers), "--json"]
        with console.status(f"data stats, {count:,} rows"):
            found[count] = run(command)
        console.print(
            f"data stats, {count:,} rows: {found[count][0]['seconds']:.1f} s, {found[count][1]:.0f} MiB"
        )
    with console.status(f"the host's preprocessing, {rows:,} rows"):
        command = [sys.executable, "-c", HOST, model, TEMPLATE, str(CUTOFF), str(work / f"rows{rows}")]
        host, host_peak = run([*command, str(workers)], LLAMAFACTORY_ASCEND="0")
    console.print(f"the host, {rows:,} rows: {host['seconds']:.1f} s, {host_peak:.0f} MiB")
    ours, peak = found[rows]
    assert (ours["kept"], ours["tokens_kept"]) == (host["rows"], host["tokens_kept"]), "other figures"
    return {
        "case": f"{rows:,} rows, {ours['tokens']:,} tokens, {workers} processes, cutoff_len {CUTOFF}",
        "rows_per_second_ratio": round(host["seconds"] / ours["seconds"], 3),
        "rows_per_second": round(rows / ours["seconds"]),
        "host_rows_per_second": round(rows / host["seconds"]),
        "peak_growth": round(peak / found[rows // 10][1], 3),
        "peak_mib": round(peak),
        "host_peak_mib": round(host_peak),
        "tokens_equal": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="`data stats` against the host's own preprocessing.")
    parser.add_argument("--rows", type=int, default=100_000, help="of the larger data set (100000)")
    parser.add_argument("--workers", type=int, default=2, help="processes of both (2)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        figures = measure(given.rows, given.workers, Path(work))
    missed = [name for name, (low, high) in REQUIRED.items() if not low <= figures[name] <= high]
    for name in missed:
        console.print(f"{name} is {figures[name]}, required: {REQUIRED[name]}")
    print(json.dumps(figures))
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
