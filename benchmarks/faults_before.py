"""Faults that are there before the start, as data."""

import json

from benchmarks import faults_means as means
from benchmarks.faults_means import CHINESE, PICTURES, ROWS, checkpoint, cut, data, model, package
from benchmarks.faults_run import ALL, DONE, Fault

LEFT_OVER = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29871",
}

ARGUMENTS = [
    Fault("unknown ascend key", "`ascend: {kernles: auto}`", ("did you mean `kernels`",), (2,),
          recipe={"ascend": {"kernles": "auto"}}),
    Fault("ascend is no block", "`ascend: 3`", ("`ascend` is 3",), (2,), recipe={"ascend": 3}),
    Fault("ascend wrong type", "`ascend: {strict: perhaps}`", ("`ascend.strict` is 'perhaps'",), (2,),
          recipe={"ascend": {"strict": "perhaps"}}),
    Fault("unknown host key", "`lora_rnak: 4`", ("no key `lora_rnak`: did you mean `lora_rank`",), (2,),
          recipe={"lora_rnak": 4}),
    Fault("wrong type", "`lora_rank: many`", ("`lora_rank` is 'many', it must be a whole number",), (2,),
          recipe={"lora_rank": "many"}),
    Fault("broken YAML", "a bracket is not closed", ("recipe.yaml", "line 1"),
          prepare=means.written("lora_target: [q_proj\nstage: sft\n")),
    Fault("empty recipe", "a file of no bytes", ("provide `model_name_or_path`",), prepare=means.written("")),
    Fault("no recipe", "the file does not exist", ("recipe.yaml",), shell='rm "${@: -1}"; "$@"'),
    Fault("recipe with blanks", "`my recipes/a b.yaml`, two ranks", (DONE,), (0,), 2,
          prepare=means.recipe_with_blanks, whole=ALL),
    Fault("output_dir with blanks", "`my runs/output 1`", (DONE,), (0,), prepare=means.at("my runs/output 1"),
          whole=ALL),
]  # fmt: skip

OUTPUT = [
    Fault("output_dir is a file", "a file in its place", ("output", "errno 17"),
          prepare=means.output_is_a_file, codes=(2,), whole=(), kept=False),
    Fault("output_dir below a file", "its parent is a file", ("cannot be written: ENOTDIR",), (2,),
          prepare=means.output_below_a_file, whole=(), kept=False),
    Fault("output_dir read-only", "a read-only file system", ("cannot be written: EROFS",), (2,),
          prepare=means.mounted("ro")),
    Fault("output_dir in use", "another process holds its lock", ("is in use by another run", "started"),
          (2,), prepare=means.held_by_another),
    Fault("stale lock", "the lock of a process that is gone", ("left its lock behind; taken over",), (0,),
          prepare=means.left_by_a_killed_run, whole=ALL),
    Fault("report cannot be written", "ascend_report.json is a folder", ("run report", "ascend_report.json"),
          (0,), prepare=means.report_is_a_folder, whole=ALL),
    Fault("home read-only", "HOME on a read-only file system", (DONE,), (0,), prepare=means.read_only_home,
          whole=ALL),
    Fault("cache read-only", "HF_HOME on a read-only file system", ("Read-only file system", "home"),
          prepare=means.read_only_cache),
    Fault("no temporary folder", "TMPDIR names none", (DONE,), (0,), env={"TMPDIR": "/nowhere"}, whole=ALL),
    Fault("temporary folder full", "TMPDIR on a full file system", (DONE,), (0,),
          prepare=means.full_temporary_folder, whole=ALL),
]  # fmt: skip

CHECKPOINTS = [
    Fault("adapter cut off", "half of the checkpoint's adapter",
          ("checkpoint-2 is not whole", "checkpoint-1"),
          prepare=checkpoint(lambda path: cut(path / "adapter_model.safetensors")), whole=(1,)),
    Fault("adapter empty", "an adapter of no bytes", ("checkpoint-2 is not whole",),
          prepare=checkpoint(lambda path: cut(path / "adapter_model.safetensors", 0)), whole=(1,)),
    Fault("adapter gone", "no adapter in the checkpoint", ("checkpoint-2 is not whole",),
          prepare=checkpoint(lambda path: (path / "adapter_model.safetensors").unlink()), whole=(1,)),
    Fault("adapter config broken", "half of adapter_config.json", ("checkpoint-2", "adapter_config.json"),
          prepare=checkpoint(lambda path: cut(path / "adapter_config.json")), whole=(1,)),
    Fault("optimizer gone", "no optimizer.pt in the checkpoint", ("checkpoint-2", "optimizer.pt"),
          prepare=checkpoint(lambda path: (path / "optimizer.pt").unlink())),
    Fault("optimizer cut off", "half of optimizer.pt", ("checkpoint-2", "optimizer.pt"),
          prepare=checkpoint(lambda path: cut(path / "optimizer.pt"))),
    Fault("scheduler empty", "a scheduler.pt of no bytes", ("checkpoint-2", "scheduler.pt"),
          prepare=checkpoint(lambda path: cut(path / "scheduler.pt", 0))),
    Fault("random state cut off", "half of rng_state.pth", ("checkpoint-2", "rng_state.pth"),
          prepare=checkpoint(lambda path: cut(path / "rng_state.pth"))),
    Fault("trainer state broken", "half of trainer_state.json",
          ("checkpoint-2", "trainer_state.json", "checkpoint-1"),
          prepare=checkpoint(lambda path: cut(path / "trainer_state.json"))),
    Fault("half a checkpoint", "a kill while checkpoint-3 was saved",
          ("no trainer_state.json", "checkpoint-2"), prepare=means.partly_saved),
]  # fmt: skip

DATA = [
    Fault("data file gone", "it does not exist", ("tiny.json",), prepare=data("", name="other.json")),
    Fault("data set unknown", "`dataset: tinny`", ("tinny", "tiny"), recipe={"dataset": "tinny"}),
    Fault("dataset_info broken", "a comma too many", ("dataset_info.json:1:37",),
          prepare=data(json.dumps(ROWS), '{"tiny": {"file_name": "tiny.json"},}')),
    Fault("data with a BOM", "UTF-8 with a byte order mark", ("BOM", "tiny.json"),
          prepare=data(b"\xef\xbb\xbf" + CHINESE.encode())),
    Fault("data in GBK", "Chinese text", ("GBK", "tiny.json"), prepare=data(CHINESE.encode("gbk"))),
    Fault("data cut off", "half of the file", ("tiny.json",), prepare=data(CHINESE.encode()[:900])),
    Fault("data empty", "`[]`", ("tiny.json",), prepare=data("[]")),
    Fault("data of no bytes", "an empty file", ("tiny.json",), prepare=data("")),
    Fault("evaluation set empty", "`eval_dataset` of `[]`", ("tiny.json",), prepare=data("[]"),
          recipe={"dataset": "good", "eval_dataset": "tiny", "eval_strategy": "steps", "eval_steps": 1}),
    Fault("tokenized_path broken", "half of dataset_dict.json", ("tokenized",),
          prepare=means.broken_tokenized),
    Fault("picture gone", "missing before the start", ("im0.png",), prepare=means.pictures, whole=(),
          kept=False, recipe=PICTURES),
]  # fmt: skip

MODEL = [
    Fault("weights cut off", "half of model.safetensors", ("model.safetensors",),
          prepare=model(lambda path: cut(path / "model.safetensors"))),
    Fault("weights empty", "a model.safetensors of no bytes", ("model.safetensors",),
          prepare=model(lambda path: cut(path / "model.safetensors", 0))),
    Fault("config broken", "half of config.json", ("config.json is not JSON",),
          prepare=model(lambda path: cut(path / "config.json"))),
    Fault("tokenizer gone", "no tokenizer files", ("holds no tokenizer",),
          prepare=model(lambda path: [file.unlink() for file in path.glob("*token*")])),
    Fault("model gone", "the folder does not exist", ("nowhere",),
          recipe={"model_name_or_path": "/nowhere/model"}),
]  # fmt: skip

PACKAGES = [
    Fault("torch_npu broken", "its import fails, as without CANN", ("libhccl.so",),
          prepare=package("torch_npu", "raise ImportError('no libhccl.so: no CANN here')", "2.10.0")),
    Fault("peft broken", "its import fails", ("peft is broken",),
          prepare=package("peft", "raise ImportError('peft is broken')")),
    Fault("fla broken", "its import fails, on a model with linear attention",
          ("fla: flash-linear-attention 0.4.0 has no complete", DONE), (0,), prepare=means.broken_fla,
          recipe={"model_name_or_path": "qwen3_5", "template": "qwen3_5_nothink", "max_steps": 2}, npu=True,
          kept=False),
    Fault("wrapt missing", "its import fails", ("Training runs as stock",), (0,),
          prepare=package("wrapt", "raise ModuleNotFoundError(\"No module named 'wrapt'\")"), whole=ALL),
    Fault("plugin raises at import", "a third party's", ("plugin `saboteur` is off", "libsaboteur.so"), (0,),
          env={"SABOTAGE": "import"}, whole=ALL),
    Fault("plugin exits at import", "a third party's", ("plugin `saboteur` is off", "SystemExit: 3"), (0,),
          env={"SABOTAGE": "exit at import"}, whole=ALL),
    Fault("plugin raises in a hook", "a third party's", ("saboteur", "no hook today"), (0,), sabotage="hook",
          whole=ALL),
    Fault("plugin raises in a callback", "a third party's", ("saboteur", "no callback today"), (0,),
          sabotage="callback", whole=ALL),
    Fault("plugin returns nonsense", "17 as sections, a word as a callback",
          ("saboteur", "ascend_trainer_callbacks"), (0,), sabotage="nonsense", whole=ALL),
    Fault("strict, and a plugin raises", "`ascend: {strict: true}`", ("saboteur", "no hook today"),
          sabotage="hook", recipe={"ascend": {"strict": True}}),
    Fault("plugin off half way", "LLAMAFACTORY_ASCEND=0 for the second half", ("train_loss",), (0,),
          env={"LLAMAFACTORY_ASCEND": "0"}, whole=ALL),
]  # fmt: skip

ENVIRONMENT = [
    Fault("torchrun missing", "not on PATH, two ranks", (DONE,), (0,), 2, env={"PATH": "/usr/bin:/bin"},
          whole=ALL),
    Fault("port in use", "somebody listens at MASTER_PORT, two ranks", ("EADDRINUSE",), ranks=2,
          prepare=means.port_in_use),
    Fault("more ranks than cards", "NPROC_PER_NODE=2 on one card", ("NPROC_PER_NODE",), (2,), 2,
          env={"SIM_NPU_DEVICES": "1"}),
    Fault("RANK left over", "RANK=1 of another program", (DONE,), (0,), env={"RANK": "1"}, whole=ALL),
    Fault("ranks left over", "all of torchrun's variables, and nobody else comes", ("unset RANK LOCAL_RANK",),
          env=LEFT_OVER, recipe={"ddp_timeout": 10}, npu=True),
    Fault("HCCL_OP_TIMEOUT", "a variable that nobody reads", ("HCCL_OP_TIMEOUT", DONE), (0,), npu=True,
          env={"HCCL_OP_TIMEOUT": "600"}, whole=ALL),
    Fault("HCCL_CONNECT_TIMEOUT", "`ten`", ("HCCL_CONNECT_TIMEOUT",), (1, 2), npu=True,
          env={"HCCL_CONNECT_TIMEOUT": "ten"}),
    Fault("stdin closed", "`<&-`", (DONE,), (0,), shell='"$@" <&-', whole=ALL),
]  # fmt: skip

BEFORE = [*ARGUMENTS, *OUTPUT, *CHECKPOINTS, *DATA, *MODEL, *PACKAGES, *ENVIRONMENT]
