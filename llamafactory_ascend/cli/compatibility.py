"""Versions against each other: what packages ask for in their metadata, and pairs that are known to break."""

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence

from llamafactory_ascend.cli.diagnosis import Finding

# Those whose own requirements say what fits; the fork of the host's next release asks for forks of its own.
DEMANDING = ("llamafactory", "llamafactory-ascend-plugin")
UNKNOWN = "of unknown version"
OLDEST_FLA = "0.5.2"  # the first with forward and backward for Ascend


def requirements() -> dict[str, list[str]]:
    """Return distribution -> what it requires, as its metadata says."""
    found = {}
    for name in DEMANDING:
        try:
            found[name] = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def judge(versions: Mapping[str, str], required: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Compare versions.

    Args:
        versions: distribution -> installed version; those that are not installed are left out.
        required: distribution -> its requirements (PEP 508).
    """
    known = {name: version for name, version in versions.items() if _is_version(version)}
    broken = [_unknown(name) for name in versions if name not in known]
    return [*broken, *_required(known, required), *(f for rule in RULES for f in rule(known))]


def _is_version(text: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def _unknown(name: str) -> Finding:
    message = "its version cannot be read, so whether it fits is not known; an installation was interrupted"
    return Finding("warning", name, message, f"pip install --force-reinstall --no-deps {name}")


def _required(versions: Mapping[str, str], required: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    installed = {canonicalize_name(name): version for name, version in versions.items()}
    for owner, lines in required.items():
        for line in lines:
            need = Requirement(line)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            version = installed.get(canonicalize_name(need.name))
            if version is not None and not need.specifier.contains(version, prereleases=True):
                yield Finding(
                    "warning",
                    need.name,
                    f"{version} is installed, {owner} asks for {need.specifier}",
                    f"pip install '{need.name}{need.specifier}'",
                )


def _torch_npu(versions: Mapping[str, str]) -> Iterator[Finding]:
    torch, npu = versions.get("torch"), versions.get("torch_npu")
    if torch and npu and _release(torch) != _release(npu):
        yield Finding(
            "warning",
            "torch_npu",
            f"{npu} was made for torch {_release(npu)}, torch is {torch}",
            f"pip install torch=={_release(npu)}, with the index your platform uses for it",
        )


def _conv3d(versions: Mapping[str, str]) -> Iterator[Finding]:
    if versions.get("torch", "").startswith("2.9."):
        yield Finding(
            "warning",
            "torch",
            f"with {versions['torch']} the host refuses every model with a Conv3d: all Qwen-VL and Qwen3.5",
            "use torch 2.8 or 2.10",
        )


def _triton(versions: Mapping[str, str]) -> Iterator[Finding]:
    if "triton" in versions and "triton-ascend" in versions:
        yield Finding(
            "warning",
            "triton",
            f"triton {versions['triton']} and triton-ascend {versions['triton-ascend']} share one folder: "
            "the one installed last overwrote the other",
            "pip uninstall triton triton-ascend; pip install triton-ascend",
        )


def _fla(versions: Mapping[str, str]) -> Iterator[Finding]:
    from packaging.version import Version

    found = versions.get("flash-linear-attention")
    if found and "torch_npu" in versions and Version(found) < Version(OLDEST_FLA):
        yield Finding(
            "note",
            "flash-linear-attention",
            f"{found} has no kernels for Ascend, so the plugin's own are used",
            f"pip install --no-deps 'flash-linear-attention>={OLDEST_FLA}'",
        )


def _two_hosts(versions: Mapping[str, str]) -> Iterator[Finding]:
    if "llamafactory" in versions and "llamafactory-kt" in versions:
        yield Finding(
            "warning",
            "llamafactory",
            "llamafactory and llamafactory-kt own the same import package: the one installed last runs",
            "pip uninstall llamafactory llamafactory-kt; pip install the one you want",
        )


def _release(version: str) -> str:
    from packaging.version import Version

    return ".".join(str(part) for part in Version(version).release[:3])


RULES: tuple[Callable[[Mapping[str, str]], Iterator[Finding]], ...] = (
    _torch_npu,
    _conv3d,
    _triton,
    _fla,
    _two_hosts,
)
