"""Is an adapter on disk whole? Judged from its files alone, no model has to be loaded."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamafactory_ascend.checks import adapter_shapes as shapes_of
from llamafactory_ascend.checks import oft
from llamafactory_ascend.checks.adapter_shapes import Shape
from llamafactory_ascend.checks.safetensors_header import TensorInfo, read_header, read_headers

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
STARTS_AT_ZERO = ("lora_B", "lora_embedding_B", "oft_R")
ORTHOGONAL = 1e-2  # what differs more from a rotation is worth a warning


@dataclass(frozen=True)
class AdapterCheck:
    """The verdict on one adapter folder.

    Attributes:
        problems: a sentence for each thing that makes the adapter unusable; none: `ok`.
        warnings: what a reader should know and what can be right.
        tensors, bytes, sha256: of adapter_model.safetensors (0, 0, "" where there is none).
        orthogonality_error: of an OFT adapter judged from its files alone, the largest ||R R' - I|| / ||I||.
    """

    path: str
    ok: bool
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    tensors: int
    bytes: int
    sha256: str
    orthogonality_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON; without an error of rotations where there are none to judge."""
        found = asdict(self)
        if self.orthogonality_error is not None and math.isnan(self.orthogonality_error):
            found["orthogonality_error"] = "NaN"  # which JSON lacks
        return {
            key: value for key, value in found.items() if key != "orthogonality_error" or value is not None
        }


def check(folder: Path, expected: Mapping[str, Shape] | None = None, trained: bool = True) -> AdapterCheck:
    """Judge an adapter that PEFT saved: LoRA (DoRA, embeddings, convolutions, modules_to_save) or OFT.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        expected: key in the file -> shape, from the live model where it is known; every one must be there.
            Without it, completeness is judged from adapter_config.json and the base model's files, as far as
            ``base_model_name_or_path`` is a folder of this machine.
        trained: an optimizer step with a learning rate above 0 was made, so what starts at zero (lora_B,
            oft_R) must have left it.

    Returns:
        The verdict; nothing that is wrong with the files raises.
    """
    file = folder / WEIGHTS
    problems: list[str] = []
    warnings: list[str] = []
    config = _read_config(folder / CONFIG, problems)
    header = _read_weights(file, problems)
    problems += oft.config_problems(config)
    error = None
    if header:
        found = {key: info.shape for key, info in header.items()}
        modules = shapes_of.by_module(found)
        if config:
            problems += _structure_problems(modules, found, config, offline=expected is None)
        problems += _expectation_problems(found, expected or {})
        value_problems, warnings = _value_problems(file, trained)
        problems += value_problems
        if config.get("peft_type") == "OFT" and expected is None and not problems:
            error, key = orthogonality(file, config)
            if not error <= ORTHOGONAL:
                warnings.append(not_orthogonal(error, key))
    size, digest = _identity(file)
    return AdapterCheck(
        str(folder), not problems, tuple(problems), tuple(warnings), len(header), size, digest, error
    )


def orthogonality(file: Path, config: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest error of the rotations in an OFT adapter's file, and the key; NaN is above all."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as weights:
        found = {
            key: oft.orthogonality_error(weights.get_tensor(key), config)
            for key in weights.keys()  # noqa: SIM118 - it has no __iter__
            if (match := shapes_of.TENSOR.fullmatch(key)) and match["kind"] == "oft_R"
        }
    worst = max(found, key=lambda key: (math.isnan(found[key]), found[key]), default="")
    return found.get(worst, 0.0), worst


def not_orthogonal(error: float, key: str) -> str:
    """Say how far the rotations of an adapter are from being any, and what would make them so."""
    return (
        f"its rotations are not orthogonal: ||RR'-I||/||I|| reaches {error:.2g}, in {key}. PEFT's series "
        "holds for small angles only; a new adapter with `ascend.oft.exact_cayley: true` rotates exactly"
    )


def sha256(file: Path) -> str:
    """Return the hex digest of a file's bytes."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _identity(file: Path) -> tuple[int, str]:
    """Return a file's size and hash, (0, "") where it is empty, missing or not to be read."""
    with contextlib.suppress(OSError):
        if size := file.stat().st_size:
            return size, sha256(file)
    return 0, ""


def _read_config(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{file} is missing or cannot be read: {error.strerror}")
    except ValueError as error:
        problems.append(f"{file} is not JSON: {error}")
    else:
        if isinstance(config, dict):
            return config
        problems.append(f"{file} holds no object")
    return {}


def _read_weights(file: Path, problems: list[str]) -> dict[str, TensorInfo]:
    if not file.is_file():
        problems.append(f"{file} is missing: no adapter was written")
        return {}
    try:
        header = read_header(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(str(error) if isinstance(error, ValueError) else f"{file} cannot be read: {error!r}")
        return {}
    if not header:
        problems.append(f"{file} holds no tensor")
    return header


def _structure_problems(
    modules: shapes_of.Modules, found: Mapping[str, Shape], config: Mapping[str, Any], offline: bool
) -> list[str]:
    kind = config.get("peft_type")
    if not modules and kind in ("LORA", "OFT"):
        return [f"no {kind} tensor among {len(found)}"]
    faults = list(shapes_of.module_faults(modules, config))
    folder = Path(str(config.get("base_model_name_or_path") or ""))
    base = _base_headers(folder)
    if base:
        faults += shapes_of.base_faults(modules, config, base)
    elif hidden := _hidden_size(folder):
        faults += shapes_of.hidden_faults(_text_modules(modules), hidden)
    problems = summarize(faults, len(modules))
    if offline:
        missing = shapes_of.missing_targets(modules, config, base)
        if missing:
            problems.append(
                f"{len(missing)} targets of adapter_config.json have no tensor in the file, e.g. {missing[0]}"
            )
        problems += summarize(shapes_of.uneven_layers(modules, config), len(modules), "layers")
    for name in config.get("modules_to_save") or []:
        if not any(f".{name}." in f".{key}" for key in found):
            problems.append(f"modules_to_save names {name}, of which the file holds nothing")
    return problems


def summarize(faults: Iterable[tuple[str, str]], total: int, what: str = "modules") -> list[str]:
    """Return one sentence per reason with the number of places and the first of them."""
    places: dict[str, list[str]] = {}
    for place, reason in faults:
        places.setdefault(reason, []).append(place)
    return [f"{reason}: {len(names)} of {total} {what}, e.g. {names[0]}" for reason, names in places.items()]


def _expectation_problems(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    missing = [key for key in expected if key not in found]
    problems = []
    if missing:
        problems.append(
            f"{len(missing)} of the model's {len(expected)} adapter tensors are missing, e.g. {missing[0]}"
        )
    wrong = [key for key, shape in expected.items() if key in found and found[key] != tuple(shape)]
    if wrong:
        key = wrong[0]
        problems.append(
            f"{len(wrong)} tensors have another shape than the model's, "
            f"e.g. {key}: {list(found[key])} instead of {list(expected[key])}"
        )
    return problems


def _value_problems(file: Path, trained: bool) -> tuple[list[str], list[str]]:
    from safetensors import SafetensorError, safe_open

    broken: list[str] = []
    starts: list[str] = []
    zero: list[str] = []
    try:
        with safe_open(file, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - it has no __iter__
                tensor = weights.get_tensor(key)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    broken.append(key)
                match = shapes_of.TENSOR.fullmatch(key)
                if match and match["kind"] in STARTS_AT_ZERO and tensor.numel():
                    starts.append(key)
                    if not bool(tensor.any()):
                        zero.append(key)
    except (OSError, SafetensorError) as error:
        return [f"{file} cannot be read: {error}"], []
    problems = []
    if broken:
        problems.append(f"{len(broken)} tensors hold NaN or infinity, e.g. {broken[0]}")
    if trained and zero and len(zero) == len(starts):
        problems.append(
            f"all {len(zero)} tensors that start at zero are still zero, e.g. {zero[0]}: nothing was learned"
        )
        return problems, []
    if trained and zero:
        return problems, [
            f"{len(zero)} of {len(starts)} tensors that start at zero are still zero, e.g. {zero[0]}"
        ]
    return problems, []


def _base_headers(folder: Path) -> dict[str, TensorInfo]:
    try:
        return read_headers(folder) if folder.is_dir() and folder != Path() else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # a base model that cannot be read is not the adapter's fault


def _hidden_size(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _text_modules(modules: shapes_of.Modules) -> shapes_of.Modules:
    from llamafactory_ascend.features.layers import component_of

    return {name: tensors for name, tensors in modules.items() if component_of(name) == "text"}
