"""Tokenized data (`tokenized_path`) carries what it was made with, and is not reused for anything else.

The host reuses whatever lies at the path and says nothing when `cutoff_len`, the template or the data have
changed since. Beside what it saved, a file says with which settings; a training with others is refused.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import __version__
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import data_checks
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from llamafactory_ascend.checks.data.catalogue import Entry
    from llamafactory_ascend.run import Arguments, Run

SIDECAR = "ascend_tokenized.json"  # in the folder of the data: who deletes or moves one has both
FORMAT = 1
DATA_KEYS = (
    "template", "cutoff_len", "train_on_prompt", "mask_history", "packing", "neat_packing", "tool_format",
    "default_system", "enable_thinking", "preserve_thinking", "max_samples", "mix_strategy",
    "interleave_probs", "val_size", "eval_on_each_dataset",
)  # fmt: skip
MODEL_KEYS = (
    "use_fast_tokenizer", "split_special_tokens", "add_tokens", "add_special_tokens", "resize_vocab",
)  # fmt: skip
MEDIA_KEYS = (
    "image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches", "video_max_pixels",
    "video_min_pixels", "video_fps", "video_maxlen", "use_audio_in_video", "audio_sampling_rate",
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "vocab.txt", "chat_template.jinja", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
PACKAGES = ("llamafactory", "llamafactory-kt", "transformers", "tokenizers")  # what makes tokens of text


@dataclass(frozen=True)
class Difference:
    """A setting that is another one now: how it is shown, before and now."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"`{self.key}`: it was made with {self.before}, now it is {self.now}"


def holds_data(path: str | None) -> bool:
    """Say whether the host would reuse what lies at a `tokenized_path`."""
    return bool(path) and os.path.isdir(str(path)) and bool(os.listdir(str(path)))  # noqa: PTH112, PTH208


def settings_of(arguments: "Arguments", given: Iterable[str], media: bool) -> dict[str, Any]:
    """Return the settings that tokenized data depends on, in the recipe's own values.

    Args:
        given: the keys that the recipe names: `cutoff_len` is one less where packing is asked for.
        media: the rows have pictures, videos or audio.
    """
    data, model = arguments.data, arguments.model
    found: dict[str, Any] = {key: getattr(data, key, None) for key in DATA_KEYS}
    if data.neat_packing or (data.packing and "packing" in set(given)):
        found["cutoff_len"] += 1
    stage = arguments.finetuning.stage
    found["stage"] = "rm" if stage == "dpo" else stage  # the same rows
    found["predict_with_generate"] = bool(getattr(arguments.training, "predict_with_generate", False))
    found |= {key: getattr(model, key, None) for key in MODEL_KEYS}
    if media:
        found |= {key: getattr(model, key, None) for key in MEDIA_KEYS}
    if data.packing:
        found["preprocessing_batch_size"] = data.preprocessing_batch_size
        found["preprocessing_num_workers"] = data.preprocessing_num_workers
    if data.val_size or data.mix_strategy != "concat":
        found["seed"] = arguments.training.seed
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | bool | int | float | list) else str(value)


def tokenizer_of(model_args: Any) -> dict[str, str]:
    """Return file -> hash of what a tokenizer is made of; of a hub's where they are in its cache.

    Where no file can be found the model's name and revision stand for them.
    """
    name, revision = model_args.model_name_or_path, getattr(model_args, "model_revision", "main")
    files = {}
    for file in TOKENIZER_FILES:
        path = Path(name) / file
        if not Path(name).is_dir():
            path = _cached(name, file, revision, getattr(model_args, "cache_dir", None)) or path
        if path.is_file():
            files[file] = digest(path)
    return files or {"model": f"{name}@{revision}"}


def _cached(name: str, file: str, revision: str, cache_dir: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision)
    except ValueError:  # no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def files_of(entry: "Entry") -> list[Path]:
    """Return the files of a data set in this machine's file system."""
    from llamafactory_ascend.checks.data import tables

    path = entry.path
    return tables.files_of(path) if path is not None else []


def data_set_of(entry: "Entry") -> dict[str, Any]:
    """Return what a data set is: the keys of its entry, and size, time and hash of its files."""
    files = {}
    for file in files_of(entry):
        stat = file.stat()
        files[file.name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest(file)}
    return {"entry": entry.keys, "files": files}


def entries_of(run: "Run", arguments: "Arguments") -> dict[str, "Entry"]:
    """Return name -> entry of data sets that are looked up in a folder; of others only the name is known."""
    data = arguments.data
    names = [*(data.dataset or []), *(data.eval_dataset or [])]
    if not names or not data_checks.is_folder(data.dataset_dir):
        return {}
    found = data_checks.catalogue(Path(data.dataset_dir), run.settings.dataset_info)
    return {name: found.find(name) for name in names}


def has_media(entries: Mapping[str, "Entry"]) -> bool:
    """Say whether a data set has a column for pictures, videos or audio."""
    from llamafactory_ascend.checks.data import schema

    columns = [
        schema.layout(entry.keys if isinstance(entry.keys, Mapping) else {}).columns
        for entry in entries.values()
    ]
    return any(one[kind] for one in columns for kind in schema.MEDIA)


def versions() -> dict[str, str]:
    """Return package -> version of what tokenizes, and of the plugin."""
    found = {"llamafactory-ascend-plugin": __version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def record(run: "Run") -> None:
    """Write what the tokenized data of this run was made with beside it, in one go."""
    arguments = run.arguments
    assert arguments is not None
    entries = entries_of(run, arguments)
    text = json.dumps(
        {
            "format": FORMAT,
            "settings": settings_of(arguments, run.given, has_media(entries)),
            "dataset": arguments.data.dataset or [],
            "eval_dataset": arguments.data.eval_dataset or [],
            "data": {name: data_set_of(entry) for name, entry in entries.items()},
            "tokenizer": tokenizer_of(arguments.model),
            "versions": versions(),
        },
        ensure_ascii=False,
        indent=2,
    )
    folder = Path(arguments.data.tokenized_path)
    handle, scratch = tempfile.mkstemp(dir=folder, prefix=f".{SIDECAR}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(folder / SIDECAR)
    finally:
        Path(scratch).unlink(missing_ok=True)
    run.decide("tokenized_path", str(folder), f"{SIDECAR} says what it was made with")


def read(folder: Path) -> dict[str, Any] | None:
    """Return what was recorded; None where nothing was: stock made the data.

    Raises:
        AscendError: it cannot be read, or a later version of the plugin wrote it.
    """
    file = folder / SIDECAR
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise AscendError(f"{file} cannot be read: {error}", _again(folder)) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise AscendError(f"{file} is not of format {FORMAT}: another version wrote it", _again(folder))
    return found


def _again(folder: Path) -> str:
    return f"rm -r {shlex.quote(str(folder))} has it made again; or name another `tokenized_path`"


def differences(
    recorded: Mapping[str, Any], run: "Run", arguments: "Arguments", entries: Mapping[str, "Entry"]
) -> list[Difference]:
    """Return the settings and data sets that are not those the tokenized data was made with."""
    found = []
    now = settings_of(arguments, run.given, has_media(entries))
    before = recorded["settings"]
    for key in (*now, *(key for key in before if key not in now)):
        if before.get(key) != now.get(key):
            found.append(Difference(key, _show(before.get(key)), _show(now.get(key))))
    for key in ("dataset", "eval_dataset"):
        names = getattr(arguments.data, key) or []
        if recorded[key] != names:
            found.append(Difference(key, ",".join(recorded[key]) or "none", ",".join(names) or "none"))
    for name, entry in entries.items():
        if name in recorded["data"]:
            found += data_set_differences(name, recorded["data"][name], entry)
    return found + tokenizer_differences(recorded["tokenizer"], tokenizer_of(arguments.model))


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def data_set_differences(name: str, before: Mapping[str, Any], entry: "Entry") -> list[Difference]:
    """Compare a data set; a file of the same size and time is not read again."""
    found = []
    if before["entry"] != entry.keys:
        found.append(Difference(f"dataset_info.json, {name}", _show(before["entry"]), _show(entry.keys)))
    files, now = before["files"], {file.name: file for file in files_of(entry)}
    for file in sorted({*files, *now}):
        key = f"dataset {name}, {file}"
        if file not in now:
            if now:  # none at all: the raw data is gone, which the host allows
                found.append(Difference(key, "a file", "missing"))
        elif file not in files:
            found.append(Difference(key, "no such file", "there"))
        else:
            stat, known = now[file].stat(), files[file]
            if stat.st_size != known["size"]:
                found.append(Difference(key, f"{known['size']:,} bytes", f"{stat.st_size:,} bytes"))
            elif stat.st_mtime_ns != known["mtime_ns"] and digest(now[file]) != known["sha256"]:
                sizes = f"{stat.st_size:,} bytes"
                found.append(Difference(key, f"other rows of {sizes}", f"changed, {sizes} too"))
    return found


def tokenizer_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """Compare tokenizers by their files; a name can only be compared with a name."""
    if ("model" in before) != ("model" in now):
        return []
    return [
        Difference(f"tokenizer, {file}", before.get(file, "none")[:12], now.get(file, "none")[:12])
        for file in sorted({*before, *now})
        if before.get(file) != now.get(file)
    ]


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    """Refuse tokenized data that was made with other settings, on every rank: none loads the model.

    Raises:
        AscendError: as said, with each difference; or the record cannot be read.
    """
    path = arguments.data.tokenized_path
    if not holds_data(path):
        return []
    folder = Path(path)
    recorded = read(folder)
    changed = differences(recorded, run, arguments, entries_of(run, arguments)) if recorded else []
    if changed:
        said = "".join(f"\n  {difference}" for difference in changed)
        message = f"{folder} was made with other settings, and would be used as it is:{said}"
        raise AscendError(message, _hint(folder, changed))
    if recorded:
        run.decide("tokenized_path", "reused", f"{folder} was made with the same settings and data")
    doubt = _doubt(folder, recorded)
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank of each node warns
    return [Finding("warning", "tokenized_path", doubt)] if doubt and first else []


def _doubt(folder: Path, recorded: Mapping[str, Any] | None) -> str:
    """Return why data that nothing speaks against may be wrong all the same; "" where nothing is in doubt."""
    if recorded is None:
        return (
            f"{folder} does not say which template, cutoff_len and data it was made with: whatever the "
            f"recipe says, it is used as it is ({_again(folder)})"
        )
    now = versions()
    others = [
        f"{name} {version} (now {now.get(name, 'not installed')})"
        for name, version in recorded["versions"].items()
        if name in PACKAGES and version != now.get(name)
    ]
    if not others:
        return ""
    return f"{folder} was made by {', '.join(others)}; where they tokenize otherwise, {_again(folder)}"


def _hint(folder: Path, changed: list[Difference]) -> str:
    old = [f"{one.key}: {one.before}" for one in changed if one.key.isidentifier()]
    settings = f"`{'`, `'.join(old)}` uses what is there; " if old else ""
    return f"{settings}{_again(folder)}"
