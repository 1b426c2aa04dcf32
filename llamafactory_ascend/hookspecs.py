"""The plugin's own hooks. What is built in uses the same ones; see ``docs/hooks.md``."""

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.kernels.backends import Backend
    from llamafactory_ascend.patching import Patch
    from llamafactory_ascend.run import Arguments, Finding, Run

PROJECT = "llamafactory_ascend"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ascend_patches() -> "list[Patch]":  # type: ignore[empty-body]
    """Return the replacements of host functions to put in the ledger."""


@hookspec
def ascend_environment(command: str) -> dict[str, str]:  # type: ignore[empty-body]
    """Return environment defaults for the processes `llamafactory-cli COMMAND` is about to start."""


@hookspec
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    """Adjust the parsed arguments of a training run, or raise AscendError to refuse it before loading."""


@hookspec
def ascend_preflight(run: "Run", arguments: "Arguments") -> "list[Finding]":  # type: ignore[empty-body]
    """Return what is worth knowing about a training run before its model is loaded."""


@hookspec
def ascend_dataset_info() -> "list[Path]":  # type: ignore[empty-body]
    """Return dataset_info.json files whose data sets a recipe can name beside the user's own."""


@hookspec
def ascend_kernels() -> "list[Backend]":  # type: ignore[empty-body]
    """Return back ends for the operators that `ascend.kernels` knows; asked before the model is loaded."""


@hookspec
def ascend_before_model(run: "Run", arguments: "Arguments") -> None:
    """Act before the host loads the model of a training run."""


@hookspec
def ascend_after_model(run: "Run", model: "torch.nn.Module") -> None:
    """Act on the model of a training run, adapters included, before a Trainer has seen it."""


@hookspec
def ascend_trainer_callbacks(  # type: ignore[empty-body]
    run: "Run", trainer: "Trainer"
) -> "list[TrainerCallback]":
    """Return callbacks for the host's Trainer, whatever the stage."""


@hookspec
def ascend_saved(run: "Run", trainer: "Trainer") -> None:
    """Act on every rank when the last model of a run is on disk, or raise AscendError to fail the run."""


@hookspec
def ascend_report_sections(run: "Run") -> dict[str, Any]:  # type: ignore[empty-body]
    """Return named sections (plain JSON data) of the run report; asked for on every rank."""
