"""A model's folder before it is loaded: JSON that can be read, and a tokenizer.

A broken config.json is reported with a line and no file. Without its files Transformers makes a tokenizer of
the model's class with an empty vocabulary, and the training goes to its end on rows of unknown tokens.
"""

import json
from pathlib import Path

VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken", "*.spm")
CONFIG = "tokenizer_config.json"
# What Transformers reads; others' notes in the same folder may be as they like.
READ = (
    "config.json", "generation_config.json", "tokenizer.json", CONFIG, "vocab.json", "added_tokens.json",
    "special_tokens_map.json", "chat_template.json", "*processor_config.json", "*.index.json",
)  # fmt: skip


def is_missing(name: str) -> bool:
    """True for a path without a folder; `name` and `owner/name` may be names on a model hub."""
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    return is_path and not Path(name).expanduser().exists()


def problems(folder: Path) -> list[str]:
    """Return what is wrong with a model's folder, as sentences; [] where it is none of this machine."""
    if not folder.is_dir():
        return []
    files = sorted({file for pattern in READ for file in folder.glob(pattern)})
    found = [problem for file in files if (problem := _broken(file))]
    if not found and not _has_tokenizer(folder):
        found.append(f"{folder} holds no tokenizer (none of {', '.join(VOCABULARIES)})")
    return found


def _broken(file: Path) -> str:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{file} is not JSON: {error}"
    return ""


def _has_tokenizer(folder: Path) -> bool:
    """True where files of a vocabulary are there, or code of the model's own that may know others."""
    if any(next(folder.glob(pattern), None) for pattern in VOCABULARIES):
        return True
    config = folder / CONFIG
    return config.is_file() and "auto_map" in json.loads(config.read_text(encoding="utf-8"))
