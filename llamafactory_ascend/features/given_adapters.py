"""The adapters that a recipe names: of which kind they are, and whether this PEFT computes what they mean.

An adapter's own adapter_config.json decides what PEFT loads, whatever `finetuning_type` says.
"""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import log
from llamafactory_ascend.checks import oft
from llamafactory_ascend.checks.adapter import CONFIG, ORTHOGONAL, WEIGHTS, not_orthogonal, orthogonality
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run


@dataclass(frozen=True)
class Adapter:
    """An adapter by its configuration.

    Attributes:
        path: as the recipe names it, a folder or a repository of the model hub.
        config: adapter_config.json, {} where it cannot be read (PEFT will say so).
        folder: where its files are, None where they are not on this machine.
    """

    path: str
    config: Mapping[str, Any]
    folder: Path | None

    @property
    def kind(self) -> str:
        """PEFT's name of the method in the host's spelling: ``lora``, ``oft``, ...; "" where unknown."""
        return str(self.config.get("peft_type") or "").lower()


def read(path: str, model: Any) -> Adapter:
    """Find an adapter's configuration as PEFT would.

    Args:
        path: a folder or a repository of the hub.
        model: the host's model arguments, for subfolder, revision and token.
    """
    if Path(path).exists():
        return of_folder(path, model.adapter_folder)
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(
            path,
            CONFIG,
            subfolder=model.adapter_folder,
            cache_dir=model.cache_dir,
            revision=model.model_revision,
            token=model.hf_hub_token,
        )
    except Exception:  # offline, no such repository, no right to read it: PEFT is going to say which
        return Adapter(path, {}, None)
    return Adapter(path, _load(Path(file)), None)


def of_folder(path: str, subfolder: str | None = None) -> Adapter:
    """Return the adapter in a folder of this machine."""
    folder = Path(path, subfolder or "")
    return Adapter(path, _load(folder / CONFIG), folder)


def _load(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def read_all(run: "Run", paths: Iterable[str] | str | None, model: Any) -> list[Adapter]:
    """Read the adapters that are about to be loaded.

    Raises:
        AscendError: this PEFT would compute something else from one of them than what was trained.
    """
    names = paths.split(",") if isinstance(paths, str) else paths or []
    found = [read(name.strip(), model) for name in names]
    for adapter in found:
        refuse_other_version(run, adapter)
    return found


def refuse_other_version(run: "Run", adapter: Adapter) -> None:
    """Let only adapters pass that this PEFT reads as they were meant.

    Raises:
        AscendError: an OFT adapter of another version, without ``ascend.oft.any_version``.
    """
    installed = importlib.metadata.version("peft")
    problems = oft.config_problems(adapter.config, installed, run.settings.oft.any_version)
    if problems:
        raise AscendError(f"the OFT adapter {adapter.path}: {problems[0]}")
    if run.settings.oft.any_version and (ignored := oft.config_problems(adapter.config, installed)):
        run.find(
            "warning",
            "oft",
            f"{adapter.path} is loaded all the same (`ascend.oft.any_version`): {ignored[0]}",
        )


def trained_further(adapters: list[Adapter], finetuning: Any) -> Adapter | None:
    """Return the adapter whose training goes on; the others are merged into the base model."""
    return adapters[-1] if adapters and not finetuning.create_new_adapter else None


def refuse_other_kind(adapter: Adapter, finetuning_type: str) -> None:
    """Let a training go on only with an adapter of the kind that the recipe names.

    Raises:
        AscendError: it is of another.
    """
    if adapter.kind in ("", finetuning_type):
        return
    hint = f"write `finetuning_type: {adapter.kind}`, or `create_new_adapter: true` to merge it first"
    raise AscendError(
        f"{adapter.path} is {article(adapter.kind)} adapter, but `finetuning_type` is {finetuning_type}: its "
        "training cannot go on as another kind",
        hint if adapter.kind in ("lora", "oft") else "the host trains `lora` and `oft` adapters only",
    )


def article(kind: str) -> str:
    """Name a kind of adapter in a sentence."""
    named = {"lora": "LoRA"}.get(kind, kind.upper())
    return f"an {named}" if named[0] in "AEIO" else f"a {named}"


def refuse_servers(adapters: list[Adapter], model: Any) -> None:
    """Keep what is no LoRA from vLLM and SGLang, which serve nothing else.

    Raises:
        AscendError: with the command that merges it.
    """
    others = [adapter for adapter in adapters if adapter.kind not in ("", "lora")]
    if others and model.infer_backend != "huggingface":
        raise AscendError(
            f"{others[0].path} is {article(others[0].kind)} adapter, "
            f"and {model.infer_backend} serves LoRA only",
            "merge it with `llamafactory-cli export` and serve the folder `export_dir`",
        )


def settle_inference(run: "Run", model: Any, finetuning: Any) -> None:
    """Give `finetuning_type` the kind of the adapters that chat, export or an evaluation loads; say so."""
    adapters = [adapter for adapter in read_all(run, model.adapter_name_or_path, model) if adapter.kind]
    for adapter in adapters:
        if adapter.kind != finetuning.finetuning_type:
            run.find(
                "warning",
                "adapter",
                f"{adapter.path} is {article(adapter.kind)} adapter and is loaded as one; "
                f"`finetuning_type: {finetuning.finetuning_type}` has no effect on it",
            )
    kinds = {adapter.kind for adapter in adapters}
    if len(kinds) == 1 and kinds <= {"lora", "oft"}:
        finetuning.finetuning_type = kinds.pop()


def report_merge(run: "Run", adapter: Adapter, dtype: str) -> None:
    """Say what merging an OFT adapter into the base model's weights costs.

    Args:
        dtype: of the weights it is merged into, as PyTorch names it without its prefix.
    """
    if adapter.kind != "oft":
        return
    if dtype in ("bfloat16", "float16"):
        run.find(
            "warning",
            "merge",
            f"{adapter.path} is merged into {dtype} weights: each rotated weight is rounded to {dtype}, so "
            "the merged model is not quite the adapter's; `infer_dtype: float32` exports what is",
        )
    if adapter.folder is not None and (adapter.folder / WEIGHTS).is_file():
        error, key = orthogonality(adapter.folder / WEIGHTS, adapter.config)
        log.info(f"{adapter.path}: merging rotations with ||RR'-I||/||I|| up to {error:.2g}")
        if not error <= ORTHOGONAL:
            run.find("warning", "merge", f"{adapter.path}: {not_orthogonal(error, key)}")
