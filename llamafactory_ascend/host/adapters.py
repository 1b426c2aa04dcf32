"""Adapters in the host: OFT is let in wherever LoRA is, and what is loaded goes by its own files."""

import copy
from collections.abc import Callable
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.features import given_adapters
from llamafactory_ascend.features.oft.blocks import SAFE_SOLVE, SOLVE_BUG
from llamafactory_ascend.patching import Patch, Target


def verify_model_args(
    original: Callable[..., None], model_args: Any, data_args: Any, finetuning_args: Any
) -> None:
    """Apply the host's rules for LoRA to OFT; none of the others in there tells the two apart.

    Raises:
        AscendError: this PEFT, or the server that was asked for, would not compute what the adapter means.
    """
    adapters = given_adapters.read_all(run.current(), model_args.adapter_name_or_path, model_args)
    given_adapters.refuse_servers(adapters, model_args)
    original(model_args, data_args, as_lora(finetuning_args))


def as_lora(finetuning_args: Any) -> Any:
    """Return the arguments of an OFT training as the host knows a LoRA training's; others as they are."""
    if finetuning_args.finetuning_type != "oft":
        return finetuning_args
    changed = copy.copy(finetuning_args)
    changed.finetuning_type = "lora"
    return changed


def get_infer_args(original: Callable[..., Any], args: Any = None) -> Any:
    """Load adapters for chat and export as what they are, whatever `finetuning_type` says."""
    model_args, data_args, finetuning_args, generating_args = original(args)
    given_adapters.settle_inference(run.current(), model_args, finetuning_args)
    return model_args, data_args, finetuning_args, generating_args


def get_eval_args(original: Callable[..., Any], args: Any = None) -> Any:
    """The same for `llamafactory-cli eval`."""
    model_args, data_args, eval_args, finetuning_args = original(args)
    given_adapters.settle_inference(run.current(), model_args, finetuning_args)
    return model_args, data_args, eval_args, finetuning_args


def init_adapter(
    original: Callable[..., Any],
    config: Any,
    model: Any,
    model_args: Any,
    finetuning_args: Any,
    is_trainable: bool,
) -> Any:
    """Merge OFT adapters in the dtype that was asked for, and say what merging costs.

    The host converts a model to `infer_dtype: float32` only after the merge has rounded its weights.
    """
    import torch

    adapters = merged_adapters(model, model_args, finetuning_args, is_trainable)
    if any(adapter.kind == "oft" for adapter in adapters):
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if not is_trainable and model_args.infer_dtype == "float32" and dtype != torch.float32:
            run.current().decide("merge", "in float32", f"`infer_dtype: float32`; the weights are {dtype}")
            model, dtype = model.to(torch.float32), torch.float32
        for adapter in adapters:
            given_adapters.report_merge(run.current(), adapter, str(dtype).removeprefix("torch."))
    return original(config, model, model_args, finetuning_args, is_trainable)


def merged_adapters(
    model: Any, model_args: Any, finetuning_args: Any, is_trainable: bool
) -> list[given_adapters.Adapter]:
    """Return the adapters that the host is going to merge, by its rules."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    whole = getattr(model, "quantization_method", None) or model_args.use_kt or model_args.use_unsloth
    if whole or is_deepspeed_zero3_enabled() or finetuning_args.finetuning_type not in ("lora", "oft"):
        return []
    adapters = given_adapters.read_all(run.current(), model_args.adapter_name_or_path, model_args)
    further = given_adapters.trained_further(adapters, finetuning_args) if is_trainable else None
    return [adapter for adapter in adapters if adapter is not further]


def cayley_batch(
    original: Callable[..., Any],
    rotation: Any,
    vectors: Any,
    block_size: int,
    use_cayley_neumann: bool = True,
    num_neumann_terms: int = 5,
) -> Any:
    """Solve systems that torch solves wrongly in a batch one by one; merging, chat and evaluation do it.

    An NPU has no solver of its own and uses the CPU's.
    """
    more = (block_size, use_cayley_neumann, num_neumann_terms)
    if use_cayley_neumann or block_size <= SAFE_SOLVE or len(vectors) < 2 or vectors.is_cuda:
        return original(rotation, vectors, *more)
    import torch

    return torch.cat([original(rotation, vector, *more) for vector in vectors.split(1)])


def create_ref_model(
    original: Callable[..., Any], model_args: Any, finetuning_args: Any, add_valuehead: bool = False
) -> Any:
    """Let the model without its adapter be its own reference; stock loads a second one for OFT."""
    return original(model_args, as_lora(finetuning_args), add_valuehead)


def create_reward_model(
    original: Callable[..., Any], model: Any, model_args: Any, finetuning_args: Any
) -> Any:
    """Load an OFT reward adapter beside the trained one; stock looks for a whole model in its folder."""
    if finetuning_args.reward_model_type != "oft":
        return original(model, model_args, finetuning_args)
    changed = copy.copy(finetuning_args)
    changed.reward_model_type = "lora"
    return original(model, model_args, changed)


PATCHES = [
    Patch(
        id="adapters.verify",
        targets=(Target("llamafactory.hparams.parser", "_verify_model_args"),),
        around=verify_model_args,
        parameters=("model_args", "data_args", "finetuning_args"),
        why='An OFT adapter is refused in training, chat and export: "only valid for the LoRA method".',
        remove_when="the host accepts `adapter_name_or_path` with `finetuning_type: oft`",
        tested={"268a4b22c936": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="adapters.infer",
        targets=(Target("llamafactory.hparams.parser", "get_infer_args"),),
        around=get_infer_args,
        parameters=("args",),
        why="What kind of adapter is loaded or merged goes unsaid, and `finetuning_type` can say another.",
        remove_when="the host compares `finetuning_type` with the adapter",
        tested={"34b5d1c8dcfd": "llamafactory 0.9.5", "0b252426b410": "llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="adapters.eval",
        targets=(Target("llamafactory.hparams.parser", "get_eval_args"),),
        around=get_eval_args,
        parameters=("args",),
        why="The same in `llamafactory-cli eval`.",
        remove_when="the host compares `finetuning_type` with the adapter",
        tested={"f3d280b2410b": "llamafactory 0.9.5", "ad0bb448a981": "llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="adapters.merge",
        targets=(Target("llamafactory.model.adapter", "init_adapter"),),
        around=init_adapter,
        parameters=("config", "model", "model_args", "finetuning_args", "is_trainable"),
        why="OFT is merged in bfloat16 whatever `infer_dtype` says; rotations that are none go unsaid.",
        remove_when="the host converts a model before it merges adapters",
        tested={"85e26a8933a2": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="adapters.rotations",
        targets=(Target("peft.tuners.oft.layer", "OFTRotationModule._cayley_batch"),),
        around=cayley_batch,
        parameters=("self", "Q", "block_size", "use_cayley_neumann", "num_neumann_terms"),
        why="Exact OFT with blocks above 150 is merged wrongly, or fails, on a CPU with several threads.",
        remove_when="torch solves batches of systems on a CPU without a race",
        upstream=SOLVE_BUG,
        tested={"13e05f99edad": "peft 0.18.1"},
    ),
    Patch(
        id="adapters.reference",
        targets=(Target("llamafactory.train.trainer_utils", "create_ref_model"),),
        around=create_ref_model,
        parameters=("model_args", "finetuning_args", "add_valuehead"),
        why="DPO with OFT loads the base model twice; with LoRA the model without adapter is the reference.",
        remove_when="the host treats OFT as LoRA there",
        tested={"a55037f43dfb": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="adapters.reward",
        targets=(Target("llamafactory.train.trainer_utils", "create_reward_model"),),
        around=create_reward_model,
        parameters=("model", "model_args", "finetuning_args"),
        why="The PPO trainer knows `reward_model_type: oft`, but its adapter is loaded as a whole model.",
        remove_when="the host treats OFT as LoRA there",
        tested={"8fdfcccdd6da": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
    ),
]
