"""Faults that happen while a run trains, as data; ``faults_saboteur.py`` makes them, in step 4."""

from benchmarks.faults_before import mounted, pictures
from benchmarks.faults_run import Fault

ALL = (1, 2, 3, 4, 5)
EVALUATION = {"eval_dataset": "tiny", "eval_strategy": "steps", "eval_steps": 1}

PROCESSES = [
    Fault("rank killed", "SIGKILL to one of two ranks", ("lost: rank 1, after step 3",), ranks=2,
          sabotage="kill", rank=1, whole=(1, 2, 3)),
    Fault("rank terminated", "SIGTERM to one of two ranks: all save and stop", ("SIGTERM",), ranks=2,
          sabotage="terminate", rank=1, whole=(1, 2, 3, 4)),
    Fault("rank exits", "os._exit(7) in one of two ranks", ("lost: rank 1, after step 3",), ranks=2,
          sabotage="exit", rank=1, whole=(1, 2, 3)),
    Fault("rank segfaults", "SIGSEGV in one of two ranks", ("lost: rank 0, after step 3",), ranks=2,
          sabotage="segfault", rank=0, whole=(1, 2, 3)),
    Fault("rank raises", "ValueError in forward", ("rank 1 failed in forward after step 3: ValueError: the layer broke",),
          ranks=2, sabotage="raise", rank=1, whole=(1, 2, 3)),
    Fault("rank hangs", "it sleeps in forward; `ddp_timeout: 10`", ("rank 0 failed",), ranks=2,
          sabotage="hang", rank=1, recipe={"ddp_timeout": 10}, whole=(1, 2, 3)),
    Fault("agent killed", "SIGKILL to torchrun: nothing of it stays", ("torchrun",), ranks=2,
          sabotage="kill agent", rank=0, whole=(1, 2, 3)),
    Fault("launcher killed", "SIGKILL to llamafactory-cli: torchrun trains on", ('"state": "completed"',), (-9,), 2,
          sabotage="kill launcher", rank=0, whole=ALL, after=120),
    Fault("launcher terminated", "SIGTERM to llamafactory-cli, two ranks", ("SIGTERM",), (143,), 2,
          sabotage="terminate launcher", rank=0, whole=(1, 2, 3, 4)),
    Fault("process killed", "SIGKILL, one rank", ("No process has finished this report", '"last_step": 3'), (-9,),
          sabotage="kill", whole=(1, 2, 3)),
    Fault("process segfaults", "SIGSEGV, one rank", ("No process has finished this report",), (-11,),
          sabotage="segfault", whole=(1, 2, 3)),
    Fault("terminated", "SIGTERM", ("SIGTERM",), (143,), sabotage="terminate", whole=(1, 2, 3, 4)),
    Fault("interrupted", "SIGINT", ("KeyboardInterrupt",), (-2, 130), sabotage="interrupt", whole=(1, 2, 3, 4)),
    Fault("interrupted twice", "SIGINT, SIGINT", ("a second SIGINT",), (-2, 130), sabotage="interrupt twice",
          whole=(1, 2, 3)),
    Fault("terminal closed", "SIGHUP", ("SIGHUP",), (129,), sabotage="hang up", whole=(1, 2, 3, 4)),
    Fault("workers killed", "SIGKILL to the data loader's workers", ("DataLoader worker",), sabotage="kill workers",
          recipe={"dataloader_num_workers": 1, "per_device_train_batch_size": 1}, whole=(1, 2, 3)),
    Fault("stdout closed", "`| head -1`", ("Broken pipe",), (0, 1), shell='set -o pipefail; "$@" | head -1'),
    Fault("stdout and stderr closed", "`2>&1 | head -1`", ('"type": "BrokenPipeError"',), (1,),
          shell='set -o pipefail; "$@" 2>&1 | head -1'),
]  # fmt: skip

FILES = [
    Fault("disk full", "nothing is left on output_dir's file system", ("No space left on device",), sabotage="fill",
          prepare=mounted(""), whole=(1, 2, 3)),
    Fault("no space in the middle", "OSError(ENOSPC) between adapter and optimizer",
          ("failed in saving after step 4", "No space left on device"), sabotage="no space", whole=(1, 2, 3)),
    Fault("file too large", "RLIMIT_FSIZE of 4 kB", ("File too large",), sabotage="limit files", whole=(1, 2, 3)),
    Fault("killed while saving", "SIGKILL between adapter and optimizer", ("No process has finished this report",),
          (-9,), sabotage="kill while saving", whole=(1, 2, 3)),
    Fault("output_dir removed", "the whole folder", ("output",), (0, 1), sabotage="remove output", whole=(), kept=False),
    Fault("report removed", "a folder in its place", ("run report", "Is a directory"), (0,), sabotage="report",
          whole=ALL),
    Fault("pictures removed", "all of them", (".png",), sabotage="pictures", prepare=pictures, whole=(1, 2, 3),
          kept=False, recipe={"model_name_or_path": "qwen25vl", "dataset": "tiny_mm", "template": "qwen2_vl",
                              "max_samples": 16}),
    Fault("adapter broken at the end", "NaN before the last save, strict", ("not finite", "checkpoint-5"),
          sabotage="poison", recipe={"ascend": {"strict": True}}, whole=(1, 2, 3, 4)),
]  # fmt: skip

DEVICE = [
    Fault("no memory to load", "1 MiB on the device", ("failed in loading", "out of memory"), npu=True,
          env={"SIM_NPU_MEMORY_MB": "0"}),
    Fault("no memory in forward", "from step 4 on", ("failed in forward after step 3", "out of memory"), npu=True,
          sabotage="forward", whole=(1, 2, 3)),
    Fault("no memory in backward", "from step 4 on", ("failed in backward after step 3", "out of memory"), npu=True,
          sabotage="backward", whole=(1, 2, 3)),
    Fault("no memory in the optimizer", "its first step", ("failed in optimizer after step 2", "out of memory"),
          npu=True, sabotage="optimizer"),
    Fault("no memory in evaluation", "from step 4 on", ("failed in evaluation after step 4", "out of memory"), npu=True,
          sabotage="evaluation", recipe=EVALUATION, whole=(1, 2, 3)),
    Fault("no memory while saving", "from step 4 on", ("failed in saving after step 4", "out of memory"), npu=True,
          sabotage="saving", whole=(1, 2, 3)),
    Fault("no memory on one rank", "in backward, two ranks", ("rank 1 failed in backward after step 3",), ranks=2,
          sabotage="backward", rank=1, whole=(1, 2, 3)),
    Fault("loss is NaN", "from step 4 on", ("not finite", "checkpoint-3"), npu=True, sabotage="nan",
          recipe={"max_steps": 8}, whole=(1, 2, 3)),
    Fault("loss is infinite", "from step 4 on", ("not finite", "checkpoint-3"), npu=True, sabotage="inf",
          recipe={"max_steps": 8}, whole=(1, 2, 3)),
    Fault("loss is 0", "from step 4 on", ("exactly 0",), npu=True, sabotage="zero", recipe={"max_steps": 8},
          whole=(1, 2, 3)),
]  # fmt: skip

DURING = [*PROCESSES, *FILES, *DEVICE]
