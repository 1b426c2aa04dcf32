"""``llamafactory-ascend data from-docs``: a folder of documents as texts for continued pretraining."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamafactory_ascend.cli import data_files, failures
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.cli.documents import Document, Length

EPILOG = """
Examples:

  llamafactory-ascend data from-docs manuals manuals.jsonl --model Qwen/Qwen3-8B

  llamafactory-ascend data from-docs manuals data/m.jsonl --model MODEL --tokens 4096 --dataset-dir data

Exit codes: 0 written, 1 written, but files were skipped, 2 nothing was written.
"""
COLUMNS = {"prompt": "text"}


def from_docs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Its .md and .txt files, at any depth.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="One text per line.")],
    model: Annotated[str, typer.Option(help="Its tokenizer counts the tokens.")],
    tokens: Annotated[
        int, typer.Option(min=16, help="Of a text at most, with its end token: the `cutoff_len`.")
    ] = 2048,
    name: Annotated[str | None, typer.Option(help="Of the data set; that of OUT by default.")] = None,
    dataset_dir: Annotated[
        Path | None, typer.Option(help="Add the entry to its dataset_info.json; else it is printed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.jsonl.")] = False,
) -> None:
    """Merge the paragraphs of documents into texts of at most --tokens tokens, each overlapping by a quarter.

    Files in GBK and UTF-16 are decoded; one that no encoding fits is named and skipped. A text that was
    there before is left out.
    """
    from llamafactory_ascend.cli import documents

    called = name or out.stem
    keys = data_files.entry_for(out, dataset_dir, COLUMNS)
    with failures.told(out):
        data_files.check_target(out, force)
        data_files.check_name(called, keys, dataset_dir)
        files = documents.find(folder)
        counter = token_counter(model)
        with data_files.written(out) as lines:
            skipped, texts, repeated = write(files, lines.write, tokens - 1, counter)
            if not texts:
                raise AscendError(f"{folder}: no file has a text; nothing was written")
        said = data_files.register(called, keys, dataset_dir)
    typer.echo(
        f"{out}: {texts:,} texts of {len(files) - skipped:,} files, {repeated:,} repeated ones left out"
    )
    if skipped:
        typer.echo(f"{skipped:,} of {len(files):,} files were skipped", err=True)
    typer.echo(said)
    raise typer.Exit(1 if skipped else 0)


def token_counter(model: str) -> "Length":
    """Return a function that counts the tokens of a text.

    Raises:
        AscendError: there is no tokenizer of that name.
    """
    from transformers import AutoTokenizer

    from llamafactory_ascend.host.arguments import refuse_broken_model

    refuse_broken_model(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise AscendError(f"--model {model}: {' '.join(str(error).split())[:300]}") from None
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def write(
    files: list[Path], put: Callable[[str], object], most: int, length: "Length"
) -> tuple[int, int, int]:
    """Write the texts of all files as lines of JSON.

    Returns:
        Files that were skipped, texts that were written, texts that were left out as repeated.
    """
    from llamafactory_ascend.checks.data import tables
    from llamafactory_ascend.cli import documents
    from llamafactory_ascend.cli.data_progress import Progress

    skipped = texts = repeated = 0
    seen: set[bytes] = set()
    with Progress() as progress:
        progress.begin("documents", tables.size(files))
        for file in files:
            document = load(file)
            progress.advance(tables.size([file]))
            if document is None or document.text is None:
                skipped += 1
                continue
            for text in documents.passages(document.text, most, length):
                digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if digest in seen:
                    repeated += 1
                    continue
                seen.add(digest)
                put(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                texts += 1
    return skipped, texts, repeated


def load(file: Path) -> "Document | None":
    """Read a document; say on stderr where it is not UTF-8 or is no text. None: it cannot be opened."""
    from llamafactory_ascend.cli import documents

    try:
        found = documents.read(file)
    except OSError as error:
        typer.echo(f"warning {file} is skipped: {error.strerror}", err=True)
        return None
    if found.text is None:
        typer.echo(f"warning {file} is skipped: its encoding is {found.encoding}", err=True)
    elif found.encoding != "UTF-8":
        typer.echo(f"{file}: decoded from {found.encoding}", err=True)
    return found
