"""Orthogonal fine-tuning (OFT): exact rotations by matrix products, computed once a step for all layers.

PEFT's default, a five-term series, is not orthogonal, and each of its layers computes it anew in every
forward and every recomputation. A new adapter gets PEFT's exact convention here, so that stock PEFT loads and
merges what was trained; only the way it is computed is ours. An adapter trained with the series keeps it.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import log
from llamafactory_ascend.checks.adapter import CONFIG, WEIGHTS, orthogonality
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.resuming import checkpoint
from llamafactory_ascend.features.sharding import ignored_reason, is_adapter, uses_fsdp
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

    from llamafactory_ascend.run import Arguments, Run

SUBJECT = "oft rotations"
EXACT, SERIES, SOLVED = "exact, shared by all layers", "PEFT's own (series)", "PEFT's own (exact)"
LIMIT = 1e-5  # of |R R^T - I|_F / sqrt(b): exact rotations are that orthogonal in float32


def trains_oft(arguments: "Arguments") -> bool:
    return bool(
        arguments.training.do_train
        and arguments.finetuning.finetuning_type == "oft"
        and is_adapter(arguments)
    )


def obstacle(arguments: "Arguments") -> str:
    """Return why rotations cannot be computed for several layers at once, "" where they can."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    training = arguments.training
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3 has each OFT weight whole in its own layer only"
    version = (training.fsdp_plugin_args or {}).get("fsdp_version") or os.environ.get("FSDP_VERSION", "1")
    if uses_fsdp(training) and int(version) == 1 and not ignored_reason(arguments, training.device.type):
        return "FSDP1 has each OFT weight whole in its own layer only"
    return ""


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    """Decide how rotations are computed.

    Raises:
        AscendError: `module_dropout`, which PEFT does not apply.
    """
    run.facts.pop("oft", None)
    run.decisions.pop(SUBJECT, None)
    if not trains_oft(arguments):
        return
    if arguments.finetuning.module_dropout:
        raise AscendError(
            f"`module_dropout: {arguments.finetuning.module_dropout}` has no effect: PEFT keeps it and never "
            "applies it",
            "remove the line, or set `module_dropout: 0`",
        )
    if not run.settings.oft.exact_cayley:
        run.decide(SUBJECT, SERIES, "`ascend.oft.exact_cayley: false`")
    elif reason := obstacle(arguments):
        run.decide(SUBJECT, SERIES, reason)
        _miss(run, f"OFT's rotations are left to PEFT's series: {reason}", "use FSDP2, ZeRO-2 or DDP")
    else:
        run.decide(SUBJECT, EXACT, "`ascend.oft.exact_cayley: true`")


def _miss(run: "Run", message: str, hint: str) -> None:
    """Report what is left to PEFT: an error where exact rotations were asked for."""
    asked = "exact_cayley" in run.settings.oft.model_fields_set and run.settings.oft.exact_cayley
    run.miss("oft" if asked else "strict", message, hint)


@hookimpl
def ascend_after_model(run: "Run", model: "nn.Module") -> None:
    """Check the blocks, and put exact rotations in place.

    Raises:
        AscendError: blocks of size 1.
    """
    assert run.arguments is not None
    if not trains_oft(run.arguments):
        return
    import peft

    from llamafactory_ascend.features.adapter_state import find_peft_model
    from llamafactory_ascend.features.oft import blocks, conventions
    from llamafactory_ascend.features.oft.substitution import agrees_with_peft, substitute

    if (found := find_peft_model(model)) is None:
        return
    peft_model = found[1]
    sizes = blocks.sizes(peft_model)
    blocks.refuse_single(sizes, by_targets=run.settings.targets is not None)
    blocks.warn(run, sizes)
    log.info(f"oft: {blocks.describe(sizes)}")
    decision = run.decisions[SUBJECT]
    if decision.choice == EXACT:
        new = not run.arguments.model.adapter_name_or_path or run.arguments.finetuning.create_new_adapter
        conventions.decide(run, peft_model, checkpoint(run.arguments.training), new)
    if run.decisions[SUBJECT].choice == EXACT and not agrees_with_peft():
        reason = "its exact rotations are others than those of the releases that are known here"
        run.decide(SUBJECT, SOLVED, f"PEFT {peft.__version__}: {reason}")
        _miss(run, f"OFT's rotations are left to PEFT {peft.__version__}: {reason}", "install peft 0.18")
    if run.decisions[SUBJECT].choice == EXACT:
        substitute(peft_model)
        for reason, count in conventions.left_to_peft(peft_model).items():
            run.find("warning", "oft", f"{count} OFT layers are left to PEFT: {reason}")
    run.facts["oft"] = {
        "rotations": run.decisions[SUBJECT].choice,
        "blocks": blocks.table(sizes),
        "orthogonality": None,
        "least_orthogonal": None,
    }


@hookimpl
def ascend_saved(run: "Run", trainer: "Trainer") -> None:
    """Measure how orthogonal the rotations of the saved adapter are, on the rank that saved it."""
    assert run.arguments is not None
    if not trains_oft(run.arguments) or "oft" not in run.facts:
        return
    if not trainer.args.should_save:
        run.facts.pop("oft")  # the other rank says the same and more
        return
    folder = Path(run.arguments.training.output_dir)
    if not (folder / WEIGHTS).is_file() or not (folder / CONFIG).is_file():
        return  # the check of the adapter says so
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    error, name = orthogonality(folder / WEIGHTS, config)
    run.facts["oft"] |= {"orthogonality": error, "least_orthogonal": name}
    if not error <= LIMIT:
        series = config.get("use_cayley_neumann", True)
        cure = "; a new adapter with `ascend: {oft: {exact_cayley: true}}` has exact ones" if series else ""
        run.find(
            "warning",
            "oft",
            f"the rotations in {folder} are not orthogonal: |R R^T - I| / |I| is {error:.1e} in {name}, so a "
            f"merge changes the norms of the weights' rows by that much{cure}",
        )


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `oft`: who computes the rotations, the block sizes, how orthogonal what was saved is."""
    return {"oft": run.facts.get("oft")}
