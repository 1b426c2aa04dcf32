"""FSDP in Accelerate and Transformers: whole model files, exact resumes, CPU offload on an NPU."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from llamafactory_ascend import log, run
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import adapter_state
from llamafactory_ascend.patching import ANYTHING, Patch, Target

UTILS = "accelerate.utils.fsdp_utils"
ISSUE = "https://github.com/huggingface/accelerate/issues/4206"
BOTH_BACKENDS = "cpu:gloo,npu:hccl"


def training_arguments(original: Callable[..., None], arguments: Any) -> None:
    """Read ``fsdp_config.offload_params``, and give offload on an NPU a process group that knows CPU tensors.

    Accelerate adds gloo beside nccl only; it leaves a process group alone that is already there.
    """
    fsdp = "full_shard" if arguments.fsdp is True else arguments.fsdp or ""
    options = fsdp if isinstance(fsdp, list) else fsdp.split()
    if not arguments.use_cpu and (options or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"):
        if options and _says_offload(arguments.fsdp_config) and "offload" not in options:
            arguments.fsdp = options = [*options, "offload"]
        if "offload" in options or os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
            _join_cpu_and_npu(timedelta(seconds=arguments.ddp_timeout))
    original(arguments)


def _says_offload(config: Any) -> bool:
    if isinstance(config, str):
        text = config if config.lstrip().startswith("{") else Path(config).read_text(encoding="utf-8")
        config = json.loads(text)
    found = config or {}
    return str(found.get("offload_params", found.get("fsdp_offload_params", ""))).lower() == "true"


def _join_cpu_and_npu(timeout: timedelta) -> None:
    import torch
    import torch.distributed as dist

    npu = getattr(
        torch, "npu", None
    )  # the host has not chosen this rank's device yet: ask for no more than this
    if npu is not None and npu.is_available() and "LOCAL_RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group(backend=BOTH_BACKENDS, timeout=timeout)
        run.current().decide(
            "process group", BOTH_BACKENDS, "FSDP's CPU offload reduces gradients of CPU tensors"
        )


def save_model(
    original: Callable[..., None], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Write model files whatever the type of FSDP's own state, unless shards were asked for."""
    sharding = run.current().facts.get("sharding") or {}
    if not (trainer.is_fsdp_enabled and sharding.get("whole_model")):
        return original(trainer, output_dir, _internal_call)
    with _full_state(trainer.accelerator.state.fsdp_plugin):
        return original(trainer, output_dir, _internal_call)


@contextmanager
def _full_state(plugin: Any) -> Iterator[None]:
    from torch.distributed.fsdp import StateDictType

    saved, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = saved


def get_state_dict(original: Callable[..., Any], accelerator: Any, model: Any, unwrap: bool = True) -> Any:
    """Gather the adapter alone where there is one; stock gathers all of the base model for it."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None) is not None
    if fsdp and run.current().arguments is not None and adapter_state.find_peft_model(model):
        return adapter_state.gather(model)
    return original(accelerator, model, unwrap)


def get_model_state(
    original: Callable[..., Any], model: Any, adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Gather the adapter whole for FSDP2's full state, under the names of the model."""
    if not _is_full_adapter(model, adapter_only, sd_options):
        return original(model, adapter_only, sd_options)
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model, options=replace(sd_options, ignore_frozen_params=True))


def set_model_state(
    original: Callable[..., Any],
    model: Any,
    state_dict: Any,
    adapter_only: bool = False,
    sd_options: Any = None,
) -> Any:
    """Give every rank its part of a whole adapter; stock loads rank 0's alone."""
    if not _is_full_adapter(model, adapter_only, sd_options):
        return original(model, state_dict, adapter_only, sd_options)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    return set_model_state_dict(model, state_dict, options=replace(sd_options, strict=False))


def _is_full_adapter(model: Any, adapter_only: bool, sd_options: Any) -> bool:
    return adapter_only and sd_options is not None and sd_options.full_state_dict and _is_peft(model)


def _is_peft(model: Any) -> bool:
    from accelerate.utils.modeling import is_peft_model

    return bool(is_peft_model(model))


def load_model(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Look at an FSDP2 adapter checkpoint before it is loaded: rank 0's slice must not pass for the whole.

    Raises:
        AscendError: on every rank, where the file is not whole and no whole adapter lies beside it.
    """
    full = plugin.fsdp_version == 2 and "FULL_STATE_DICT" in str(plugin.state_dict_type)
    if not (full and kwargs.get("adapter_only") and _is_peft(model)):
        return original(plugin, accelerator, model, input_dir, *args, **kwargs)
    import torch.distributed as dist

    folder = Path(input_dir)
    fault, error, state = _judge_checkpoint(model, folder) if accelerator.is_main_process else ("", "", {})
    verdict = [(fault, error)]
    dist.broadcast_object_list(verdict, src=0)
    fault, error = verdict[0]
    if error:
        raise AscendError(
            error,
            "start from adapter_name_or_path with a good adapter, or resume from another checkpoint",
            ISSUE,
        )
    if not fault:
        return original(plugin, accelerator, model, input_dir, *args, **kwargs)
    run.current().decide(
        "resume", f"{folder}/adapter_model.safetensors", f"pytorch_model_fsdp.bin is not whole: {fault}"
    )
    log.warn(
        f"{folder}/pytorch_model_fsdp.bin is not whole ({fault}); adapter_model.safetensors beside it is used"
    )
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    return set_model_state_dict(model, state, options=options)


def _judge_checkpoint(model: Any, folder: Path) -> tuple[str, str, dict[str, Any]]:
    """Return (what is wrong with pytorch_model_fsdp.bin, why nothing can replace it, what replaces it)."""
    import torch
    from safetensors.torch import load_file

    from llamafactory_ascend.checks.adapter import WEIGHTS, check

    file = folder / "pytorch_model_fsdp.bin"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        fault = adapter_state.state_problem(model, state)
    except Exception as error:  # whatever a damaged file raises on rank 0, the other ranks must hear of it
        fault = f"{type(error).__name__}: {error}"
    if not fault:
        return "", "", {}
    result = check(folder, trained=False)
    if not result.ok:
        return fault, f"{file} is not whole: {fault}; nor is {folder / WEIGHTS}: {result.problems[0]}", {}
    saved = adapter_state.by_model_name(model, load_file(folder / WEIGHTS))
    left = adapter_state.state_problem(model, saved)
    return (
        fault,
        f"{file} is not whole: {fault}; {folder / WEIGHTS} does not fit: {left}" if left else "",
        saved,
    )


def load_optimizer(
    original: Callable[..., None],
    plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Load a sharded optimizer state into one that has been initialised, under the names it was saved with.

    Accelerate below 1.13 asks for other names; FSDP1's state is empty before its first step, and nothing is
    loaded into what is not there.
    """
    if "SHARDED_STATE_DICT" not in str(plugin.state_dict_type) or kwargs.get("use_dcp") is False:
        return original(plugin, accelerator, optimizer, model, input_dir, *args, **kwargs)
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    name = f"optimizer_{args[0] if args else kwargs.get('optimizer_index', 0)}"
    folder = Path(input_dir)
    accelerator.wait_for_everyone()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, storage_reader=FileSystemReader(folder if folder.name == name else folder / name))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return None


PATCHES = [
    Patch(
        id="fsdp.process_group",
        targets=(Target("transformers.training_args", "TrainingArguments.__post_init__"),),
        around=training_arguments,
        parameters=("self",),
        why="CPU offload all-reduces CPU tensors, which hccl cannot; `offload_params` is not read.",
        remove_when="accelerate adds gloo beside hccl as it does beside nccl",
        tested={"cfedc2a22f4f": "transformers 5.6.0 and 5.8.0"},
    ),
    Patch(
        id="fsdp.save_model",
        targets=(Target("transformers.trainer", "Trainer.save_model"),),
        around=save_model,
        parameters=("self", "output_dir", "_internal_call"),
        why="With FSDP2's default, a sharded state, no model or adapter is written anywhere.",
        remove_when="Trainer.save_model writes a model for every state dict type",
        tested={"ca8d2be9f60f": "transformers 5.6.0 and 5.8.0"},
    ),
    Patch(
        id="fsdp.state_dict",
        targets=(Target("accelerate.accelerator", "Accelerator.get_state_dict"),),
        around=get_state_dict,
        parameters=("self", "model", "unwrap"),
        why="The whole base model is gathered to rank 0 to save an adapter.",
        remove_when="accelerate gathers trainable parameters alone for a PEFT model",
        tested={"2afe4c13fc2f": "accelerate 1.11.0", "d3650a99fc23": "accelerate 1.12.0 to 1.15.0"},
    ),
    Patch(
        id="fsdp.get_model_state",
        targets=(Target(UTILS, "_get_model_state_dict"),),
        around=get_model_state,
        parameters=("model", "adapter_only", "sd_options"),
        why="FSDP2 with a full state saves rank 0's slice of the adapter, so that a resume loses the rest.",
        remove_when="accelerate 1.15.0 is the oldest version in use",
        upstream=ISSUE,
        tested={"f2e66cbb8bd7": "accelerate 1.11.0 to 1.14.0"},
        fixed={"314bf9855b4e": "accelerate 1.15.0"},
    ),
    Patch(
        id="fsdp.set_model_state",
        targets=(Target(UTILS, "_set_model_state_dict"),),
        around=set_model_state,
        parameters=("model", "state_dict", "adapter_only", "sd_options"),
        why="FSDP2 with a full state loads the adapter on rank 0 alone.",
        remove_when="accelerate 1.15.0 is the oldest version in use",
        upstream=ISSUE,
        tested={"9fa75ec642ce": "accelerate 1.11.0 to 1.14.0"},
        fixed={"75577429ea90": "accelerate 1.15.0"},
    ),
    Patch(
        id="fsdp.load_model",
        targets=(Target(UTILS, "load_fsdp_model"),),
        around=load_model,
        parameters=("fsdp_plugin", "accelerator", "model", "input_dir", ANYTHING),
        why="A checkpoint of an older accelerate holds rank 0's slice; every version loads it in silence.",
        remove_when="nobody resumes from checkpoints of accelerate below 1.15.0",
        upstream=ISSUE,
        tested={"b076051302a6": "accelerate 1.11.0 to 1.14.0", "1e805f10e131": "accelerate 1.15.0"},
    ),
    Patch(
        id="fsdp.load_optimizer",
        targets=(Target(UTILS, "load_fsdp_optimizer"),),
        around=load_optimizer,
        parameters=("fsdp_plugin", "accelerator", "optimizer", "model", "input_dir", ANYTHING),
        why="A sharded optimizer state is not loaded: by FSDP2 before accelerate 1.13, nor by FSDP1.",
        remove_when="accelerate initialises FSDP1's optimizer state before it loads into it",
        upstream=ISSUE,
        tested={
            "071e79900656": "accelerate 1.11.0 and 1.12.0",
            "cccfdd7961f2": "accelerate 1.13.0 and 1.14.0",
            "686245893cc0": "accelerate 1.15.0",
        },
    ),
]
