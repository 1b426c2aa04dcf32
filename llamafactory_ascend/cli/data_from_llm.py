"""``llamafactory-ascend data from-llm``: question-answer pairs about documents, by a language model."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamafactory_ascend.cli import data_files, failures
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.cli.chat_endpoint import Endpoint
    from llamafactory_ascend.cli.journal import Journal
    from llamafactory_ascend.cli.question_answers import Pairs

EPILOG = """
Examples:

  llamafactory-ascend data from-llm manuals qa.jsonl --endpoint http://127.0.0.1:8000/v1 --model Qwen/Qwen3-8B

  OPENAI_API_KEY=... llamafactory-ascend data from-llm manuals qa.jsonl --endpoint https://a.example --model M

Interrupted or unanswered, the same command goes on where it stopped: what is done lies in OUT.jsonl.part.

Exit codes: 0 written, 1 written, but files were skipped or passages gave no pair, 2 nothing was written,
130 interrupted.
"""
KEY_VARIABLE = "OPENAI_API_KEY"
GIVE_UP = 3  # passages one after the other without an answer: the endpoint is down
INTERRUPTED = 130


def from_llm(
    folder: Annotated[Path, typer.Argument(metavar="DOCS", help="Its .md and .txt files, at any depth.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="One pair per line, in alpaca's keys.")],
    endpoint: Annotated[str, typer.Option(metavar="URL", help="OpenAI-compatible: a server's root or /v1.")],
    model: Annotated[str, typer.Option(help="As the endpoint calls it.")],
    pairs: Annotated[int, typer.Option(min=1, help="To ask for, about each passage.")] = 3,
    characters: Annotated[int, typer.Option(min=200, help="Of a passage at most.")] = 3000,
    parallel: Annotated[int, typer.Option(min=1, help="Questions at the same time.")] = 4,
    tries: Annotated[int, typer.Option(min=1, help="Of a question that fails.")] = 6,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 120.0,
    temperature: Annotated[float, typer.Option(min=0, help="Of the model.")] = 0.7,
    key_variable: Annotated[
        str,
        typer.Option(metavar="NAME", help="The environment variable with the key, if one is needed."),
    ] = KEY_VARIABLE,
    name: Annotated[str | None, typer.Option(help="Of the data set; that of OUT by default.")] = None,
    dataset_dir: Annotated[
        Path | None, typer.Option(help="Add the entry to its dataset_info.json; else it is printed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.jsonl, and begin anew.")] = False,
) -> None:
    """Ask a model for question-answer pairs about every passage of documents; only valid ones are written.

    Nothing is sent anywhere but to --endpoint, and the key stands in no file and no message.
    """
    from llamafactory_ascend.cli import chat_endpoint, journal

    called = name or out.stem
    keys = data_files.entry_for(out, dataset_dir, {})
    try:
        with failures.told(out):
            data_files.check_target(out, force)
            data_files.check_name(called, keys, dataset_dir)
            key = chat_endpoint.usable_key(os.environ.get(key_variable, ""), key_variable)
            url = chat_endpoint.completions_url(endpoint)
            asked = chat_endpoint.Endpoint(url, model, key, tries, timeout, temperature)
            skipped, passages = read(folder, characters)
            settings = {"model": model, "pairs": pairs, "characters": characters, "temperature": temperature}
            with journal.opened(out.with_name(f"{out.name}.part"), settings, force) as done:
                missing = collect(asked, passages, pairs, parallel, done)
                if missing:
                    kept = f", what is done is in {done.file}" if done.pairs else ""
                    raise AscendError(
                        f"{len(missing):,} of {len(passages):,} passages have no answer, the last one: "
                        f"{missing[-1]}; {out} is not written{kept}",
                        "see to the endpoint's address and key; the same command asks for the rest",
                    )
                written, barren = write(out, passages, done)
                said = data_files.register(called, keys, dataset_dir)
                done.remove()
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on where it stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{out}: {written:,} pairs about {len(passages):,} passages")
    if barren:
        typer.echo(f"{barren:,} passages gave no valid pair", err=True)
    typer.echo(said)
    raise typer.Exit(1 if skipped or barren else 0)


def read(folder: Path, characters: int) -> tuple[int, dict[str, str]]:
    """Return how many files were skipped, and hash -> passage of all others.

    Raises:
        AscendError: there are no documents, or no text in them.
    """
    from llamafactory_ascend.cli import data_from_docs, documents

    skipped, found = 0, {}
    for file in documents.find(folder):
        document = data_from_docs.load(file)
        if document is None or document.text is None:
            skipped += 1
            continue
        for passage in documents.passages(document.text, characters, len):
            found[hashlib.sha256(passage.encode("utf-8", "surrogatepass")).hexdigest()[:32]] = passage
    if not found:
        raise AscendError(f"{folder}: no file has a text; nothing was written")
    return skipped, found


def collect(
    endpoint: "Endpoint", passages: dict[str, str], pairs: int, parallel: int, done: "Journal"
) -> list[str]:
    """Ask about every passage that is not in the journal, and write each answer into it at once.

    Returns:
        What was said of each passage that has no answer, some of which may not have been asked about.

    Raises:
        KeyboardInterrupt: answers that were under way have been waited for; a second one ends at once.
    """
    from llamafactory_ascend.cli.chat_endpoint import Unanswered

    waiting = [passage for passage in passages if passage not in done.pairs]
    _progress(len(passages) - len(waiting), len(passages))
    missing: list[str] = []
    in_a_row = 0
    with ThreadPoolExecutor(parallel) as pool:
        futures: dict[Future[Pairs], str] = {
            pool.submit(_ask, endpoint, passages[passage], pairs): passage for passage in waiting
        }
        try:
            for future in as_completed(futures):
                try:
                    done.add(futures[future], future.result())
                    in_a_row = 0
                except Unanswered as error:
                    missing.append(str(error))
                    in_a_row += 1
                    if in_a_row >= GIVE_UP:
                        _drop(endpoint, futures)
                        break
                _progress(len(done.pairs), len(passages))
        except KeyboardInterrupt:
            _drop(endpoint, futures)
            typer.echo("waiting for the answers that are under way; Ctrl-C again drops them", err=True)
            try:
                _save(futures, done)
            except KeyboardInterrupt:
                sys.stderr.flush()
                os._exit(INTERRUPTED)  # the threads would be waited for
            raise
        except BaseException:  # the disk is full: answers that nobody can keep are not asked for
            _drop(endpoint, futures)
            raise
        _save(futures, done)
    unasked = sum(passage not in done.pairs for passage in passages) - len(missing)
    return ["not asked"] * max(unasked, 0) + missing


def _ask(endpoint: "Endpoint", passage: str, pairs: int) -> "Pairs":
    """Ask until one pair is valid; what is said after the last try stands, without one."""
    from llamafactory_ascend.cli import question_answers

    for _ in range(3):
        found = question_answers.parse(endpoint.ask(question_answers.messages(passage, pairs)))
        if found.valid or endpoint.stop.is_set():
            break
    return found


def _drop(endpoint: "Endpoint", futures: "dict[Future[Pairs], str]") -> None:
    endpoint.stop.set()
    for future in futures:
        future.cancel()


def _save(futures: "dict[Future[Pairs], str]", done: "Journal") -> None:
    """Wait for what is under way and keep what comes of it."""
    from llamafactory_ascend.cli.chat_endpoint import Unanswered

    for future, passage in futures.items():
        if not future.cancelled() and passage not in done.pairs:
            try:
                done.add(passage, future.result())
            except Unanswered:
                continue


def _progress(done: int, total: int) -> None:
    end = "\n" if done == total or not sys.stderr.isatty() else ""
    start = "\r" if sys.stderr.isatty() else ""
    if sys.stderr.isatty() or done == total or not done % max(total // 20, 1):
        typer.echo(f"{start}{done:,} of {total:,} passages answered{end}", err=True, nl=False)


def write(out: Path, passages: dict[str, str], done: "Journal") -> tuple[int, int]:
    """Write the pairs of all passages, in the order of the documents, each question once.

    Returns:
        How many pairs were written, and how many passages gave none.

    Raises:
        AscendError: there is none at all.
    """
    rows = list(_rows(passages, done))
    if not rows:
        reasons = sorted({reason for found in done.pairs.values() for reason in found.rejected})
        raise AscendError(
            f"no answer holds a valid pair ({'; '.join(reasons)}); nothing was written",
            "--force asks about all passages again",
        )
    with data_files.written(out) as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    return len(rows), sum(not done.pairs[passage].valid for passage in passages)


def _rows(passages: dict[str, str], done: "Journal") -> Iterator[dict[str, Any]]:
    from llamafactory_ascend.cli import question_answers

    seen = set()
    for passage in passages:
        for pair in done.pairs[passage].valid:
            question = question_answers.same(pair["question"])
            if question not in seen:
                seen.add(question)
                yield {"instruction": pair["question"], "input": "", "output": pair["answer"]}
