"""The modules that get an adapter: exactly those that the recipe means, counted and printed.

`ascend.targets` names them by component, whole parts of their path and blocks. Without it the host's
`lora_target` (compared as a substring) decides as ever, and what it reached is shown all the same.
Imported with the settings, so nothing heavy is imported here.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from llamafactory_ascend.features.targets.adapted import Adapted
    from llamafactory_ascend.features.targets.selection import Selection
    from llamafactory_ascend.run import Arguments, Run

SELECTION = "targets.selection"  # among the facts: what the host was told to adapt, None: its own choice
FEATURE = "targets"


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    """Refuse other settings that choose modules.

    Raises:
        AscendError: see ``conflicts.refuse``.
    """
    from llamafactory_ascend.features.targets.conflicts import refuse

    run.facts.pop(FEATURE, None)  # of an earlier training in this process
    run.facts.pop(SELECTION, None)
    wish = run.settings.targets
    if wish is not None and arguments.training.do_train:
        refuse(arguments, run.given)
        run.decide(FEATURE, str(wish), "`ascend.targets`")


def choose(run: "Run", model: "nn.Module") -> list[str] | str | None:
    """Return what the host is to hand PEFT as target modules, None where the recipe leaves it to the host.

    Raises:
        AscendError: the recipe names something that the model does not have.
    """
    wish = run.settings.targets
    if run.arguments is None:
        return None
    run.facts[SELECTION] = None  # asked for, which the host does for a new adapter only
    if wish is None:
        return None
    from llamafactory_ascend.features.targets.selection import exact, select

    selection = run.facts[SELECTION] = select(model, wish)
    return exact(selection.names, model)


@hookimpl
def ascend_after_model(run: "Run", model: "nn.Module") -> None:
    """Compare what was adapted with what the recipe names, and show it.

    Raises:
        AscendError: it is not the same.
    """
    from llamafactory_ascend.features.targets.conflicts import ADAPTERS

    assert run.arguments is not None
    if run.arguments.finetuning.finetuning_type not in ADAPTERS or not run.arguments.training.do_train:
        return
    if run.settings.targets is not None:
        show(run, model)
    else:  # the run can do without
        run.attempt("the table of target modules", show, run, model)


def show(run: "Run", model: "nn.Module") -> None:
    """Put the table of target modules into the log and the report, with what is odd about them.

    Raises:
        AscendError: the adapters do not sit where `ascend.targets` says.
    """
    from llamafactory_ascend.features.targets.adapted import Adapted, tied
    from llamafactory_ascend.features.targets.conflicts import idle_flags
    from llamafactory_ascend.features.targets.summary import section, table

    assert run.arguments is not None
    adapted = Adapted.of(model)
    matched: Mapping[str, Sequence[str]]
    wish = run.settings.targets
    if wish is not None:
        selection = _checked(run, model, adapted)
        origin = "ascend.targets"
        matched = {match.label: match.modules for match in selection.matches}
        left_out = [f"`{match.label}` leaves out {x}" for match in selection.matches for x in match.left_out]
        for sentence in left_out:
            run.find("note", FEATURE, sentence)
        for sentence in selection.warnings:
            run.find("warning", FEATURE, sentence)
    else:
        left_out = []
        origin, matched = _of_the_host(run, adapted)
    found = run.facts[FEATURE] = section(origin, matched, adapted)
    flags = idle_flags(run.arguments.finetuning, run.given, adapted.trainable, origin)
    for sentence in [*flags, *tied(model)]:
        run.find("warning", FEATURE, sentence)
    log.info("\n".join([table(found), *(f"  {sentence}" for sentence in left_out)]))


def _checked(run: "Run", model: "nn.Module", adapted: "Adapted") -> "Selection":
    """Return what the recipe names, where the adapters sit on just that."""
    from llamafactory_ascend.features.targets.selection import select

    selection: Selection | None = run.facts.get(SELECTION)
    resumed = _resumed(run)
    if selection is None and not resumed:
        raise AscendError(
            "the host did not ask for target modules, so `ascend.targets` was not heeded",
            "llamafactory-ascend doctor",
        )
    if selection is None:
        assert run.settings.targets is not None
        selection = select(model, run.settings.targets)
    missing = [name for name in selection.names if name not in adapted.modules]
    extra = sorted(set(adapted.modules) - set(selection.names))
    if not missing and not extra:
        return selection
    words = [f"{len(missing)} modules that it names have none, e.g. {missing[0]}"] if missing else []
    words += [f"{len(extra)} others have one, e.g. {extra[0]}"] if extra else []
    if resumed:
        raise AscendError(
            f"the adapter {resumed} decides where it sits, and `ascend.targets` says otherwise: "
            + "; ".join(words),
            "remove `ascend.targets`, or set `create_new_adapter: true` to merge the old one and start anew",
        )
    raise AscendError(
        f"the adapters do not sit where `ascend.targets` says: {'; '.join(words)}",
        "is one of them within a module of `additional_target`? That is trained whole, without an adapter",
    )


def _resumed(run: "Run") -> str:
    """Return the adapter that training goes on with, "" where a new one is made."""
    assert run.arguments is not None
    paths = run.arguments.model.adapter_name_or_path
    return str(paths[-1]) if paths and SELECTION not in run.facts else ""


def _of_the_host(run: "Run", adapted: "Adapted") -> tuple[str, Mapping[str, Sequence[str]]]:
    """Return what chose the modules of a recipe without `ascend.targets`, and what each pattern reached."""
    from llamafactory_ascend.features.targets.adapted import by_pattern, surprises

    assert run.arguments is not None
    finetuning = run.arguments.finetuning
    if resumed := _resumed(run):
        leaves = dict.fromkeys(path.rpartition(".")[2] for path in adapted.modules)
        paths = {leaf: [p for p in adapted.modules if p.rpartition(".")[2] == leaf] for leaf in leaves}
        return f"the adapter {resumed}", paths
    setting = "lora_target"
    if finetuning.finetuning_type == "oft" and finetuning.oft_target == finetuning.lora_target:
        setting = "oft_target"
    patterns = by_pattern(adapted, finetuning.lora_target)
    for sentence in surprises(adapted, patterns, setting):
        run.find("warning", FEATURE, sentence)
    return setting, patterns


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `targets`: adapted modules and trainable parameters by component; null without adapters."""
    return {FEATURE: run.facts.get(FEATURE)}
