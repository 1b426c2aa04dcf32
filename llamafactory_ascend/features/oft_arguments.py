"""The arguments of an OFT training: its targets and block size, and what the host prepares for LoRA alone."""

from typing import TYPE_CHECKING, Any

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import given_adapters
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from llamafactory_ascend.features.given_adapters import Adapter
    from llamafactory_ascend.run import Arguments, Run

ALL = ["all"]
OPTIMIZERS = ("use_galore", "use_apollo", "use_badam")


@hookimpl(tryfirst=True)
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    """Settle adapters and, for OFT, targets, block size and DDP, before any other plugin looks at them.

    Raises:
        AscendError: what was asked for cannot be, or would train something else.
    """
    model, training, finetuning = arguments.model, arguments.training, arguments.finetuning
    kind = finetuning.finetuning_type
    if kind not in ("lora", "oft"):
        return
    adapters = given_adapters.read_all(run, model.adapter_name_or_path, model)
    given_adapters.read_all(run, finetuning.ref_model_adapters, model)
    check_reward_model(run, arguments)
    if not training.do_train:
        given_adapters.settle_inference(run, model, finetuning)
        adapters = []
    further = given_adapters.trained_further(adapters, finetuning)
    if further:
        given_adapters.refuse_other_kind(further, kind)
    if finetuning.finetuning_type != "oft":
        return
    prepare_as_lora(run, training)
    if training.do_train:
        refuse_optimizers(finetuning)
        if run.settings.targets is None:
            choose_targets(run, finetuning)
        choose_blocks(run, finetuning)
        if further:
            report_ignored(run, further, finetuning)


def check_reward_model(run: "Run", arguments: "Arguments") -> None:
    """Refuse a reward adapter of another kind than the one that PPO trains: PEFT cannot switch between them.

    Raises:
        AscendError: the two differ.
    """
    finetuning = arguments.finetuning
    if finetuning.stage != "ppo":
        return
    if finetuning.reward_model_type not in ("lora", "oft"):
        given_adapters.read_all(run, finetuning.reward_model_adapters, arguments.model)
        return
    (reward,) = given_adapters.read_all(run, [finetuning.reward_model], arguments.model)
    if reward.kind not in ("", finetuning.finetuning_type):
        raise AscendError(
            f"the reward model {reward.path} is {given_adapters.article(reward.kind)} adapter, but "
            f"`finetuning_type` is {finetuning.finetuning_type}: one model cannot hold both",
            "merge it with `llamafactory-cli export` (stage: rm) and write `reward_model_type: full`",
        )


def refuse_optimizers(finetuning: Any) -> None:
    """Refuse for OFT what the host refuses for LoRA.

    Raises:
        AscendError: GaLore, APOLLO or BAdam; they choose weights of the base model, which is frozen.
    """
    for key in OPTIMIZERS:
        if getattr(finetuning, key, False):
            raise AscendError(
                f"`{key}: true` chooses among the base model's weights, which OFT freezes",
                "remove it, or train with `finetuning_type: full`",
            )


def prepare_as_lora(run: "Run", training: Any) -> None:
    """Set what the host sets for LoRA: label names, and DDP that does not look for unused parameters."""
    training.label_names = training.label_names or ["labels"]
    if training.parallel_mode.value == "distributed" and training.ddp_find_unused_parameters is None:
        training.ddp_find_unused_parameters = False
        run.decide(
            "ddp_find_unused_parameters",
            "False",
            "as the host has it for LoRA; checkpointing needs it with DDP",
        )


def choose_targets(run: "Run", finetuning: Any) -> None:
    """Put the targets where the host reads them: it parses `oft_target` and takes `lora_target`."""
    own, others = finetuning.oft_target, finetuning.lora_target
    own_given = "oft_target" in run.given or own != ALL
    others_given = "lora_target" in run.given or others != ALL
    if own_given:
        if others_given and set(own) != set(others):
            run.find(
                "warning",
                "oft",
                f"`oft_target: {_words(own)}` and `lora_target: {_words(others)}` differ: oft_target holds",
            )
        run.decide("oft targets", _words(own), "`oft_target`")
        finetuning.lora_target = own
    elif others_given:
        log.info(
            f"oft: no `oft_target` is given, so `lora_target: {_words(others)}` holds, as the host has it"
        )
        run.decide("oft targets", _words(others), "`lora_target`; there is no `oft_target`")
        finetuning.oft_target = others
    else:
        run.decide("oft targets", "all", "the host's default")


def _words(targets: list[str]) -> str:
    return ",".join(targets)


def choose_blocks(run: "Run", finetuning: Any) -> None:
    """Let `oft_rank` hold where it alone is given: the host's default for `oft_block_size` stands in its way.

    Raises:
        AscendError: both are given, or neither is above 0, or one is no whole number.
    """
    rank, size = finetuning.oft_rank, finetuning.oft_block_size
    for key, value in (("oft_rank", rank), ("oft_block_size", size)):
        if type(value) is not int or value < 0:  # the host passes on what a recipe says
            raise AscendError(
                f"`{key}: {value}` is no whole number from 0 on", "write `oft_block_size: 32`, for example"
            )
    if rank and size:
        if "oft_block_size" in run.given:
            raise AscendError(
                f"`oft_rank: {rank}` (blocks in a layer) and `oft_block_size: {size}` are both given, and "
                "each follows from the other",
                "remove one of them",
            )
        finetuning.oft_block_size = 0
        run.decide(
            "oft blocks", f"{rank} in each layer", "`oft_rank`; the default `oft_block_size` makes room"
        )
    elif not rank and not size:
        raise AscendError(
            "`oft_rank` and `oft_block_size` are both 0", "write `oft_block_size: 32`, for example"
        )


def report_ignored(run: "Run", adapter: "Adapter", finetuning: Any) -> None:
    """Say which wishes have no effect, because the adapter whose training goes on has its own."""
    found = adapter.config
    wished = {
        "oft_block_size": (finetuning.oft_block_size, found.get("oft_block_size")),
        "oft_rank": (finetuning.oft_rank, found.get("r")),
        "module_dropout": (finetuning.module_dropout, found.get("module_dropout")),
        "oft_target": (sorted(finetuning.oft_target), _sorted(found.get("target_modules"))),
        "additional_target": (
            _sorted(finetuning.additional_target or []),
            _sorted(found.get("modules_to_save") or []),
        ),
    }
    for key, (wish, has) in wished.items():
        # `all` and the pattern that the host makes of a list cannot be compared with what became of them.
        if key in run.given and wish not in (has, ALL) and not isinstance(has, str):
            run.find(
                "warning",
                "oft",
                f"`{key}: {wish}` has no effect: the training of {adapter.path} goes on with {has}. "
                "`create_new_adapter: true` merges it and trains a new one",
            )


def _sorted(names: Any) -> Any:
    return sorted(names) if isinstance(names, list | set | tuple) else names


@hookimpl
def ascend_after_model(run: "Run", model: "nn.Module") -> None:
    """Let an adapter of an older PEFT be saved as one of this PEFT, which is what its weights become."""
    import importlib.metadata

    for config in getattr(model, "peft_config", {}).values():
        if str(getattr(config, "peft_type", "")).endswith("OFT") and run.settings.oft.any_version:
            config.peft_version = importlib.metadata.version("peft")
