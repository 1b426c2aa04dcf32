"""What the plugin does with OFT around a training: refusals, conventions, what is saved and reported."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.oft.layer import OFTRotationModule
from torch import nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import oft
from llamafactory_ascend.features.oft import EXACT, SERIES, SOLVED, SUBJECT, blocks
from llamafactory_ascend.run import Arguments, Run
from llamafactory_ascend.settings import Settings
from tests.features.oft.models import config, logits, loss, with_peft
from tests.training import load


def make_run(output: Path | None = None, **changes: Any) -> Run:
    """A run with the settings ``oft`` and the host's arguments that are given."""
    settings = Settings.model_validate(
        {"oft": changes.pop("oft", {}), "strict": changes.pop("strict", False)}
    )
    training = {
        "do_train": True,
        "fsdp": [],
        "fsdp_plugin_args": None,
        "resume_from_checkpoint": None,
        "output_dir": str(output),
        "device": torch.device("cpu"),
        "use_cpu": True,
    }
    finetuning = {"finetuning_type": "oft", "module_dropout": 0.0, "create_new_adapter": False}
    model = {"adapter_name_or_path": None}
    for name, value in changes.items():
        next(group for group in (training, finetuning, model) if name in group)[name] = value
    groups = [SimpleNamespace(**group) for group in (model, training, finetuning)]
    return Run(settings=settings, arguments=Arguments(groups[0], None, groups[1], groups[2], None))


def prepare(run: Run, model: nn.Module) -> None:
    assert run.arguments is not None
    oft.ascend_arguments(run=run, arguments=run.arguments)
    oft.ascend_after_model(run=run, model=model)


def save(run: Run, model: PeftModel, folder: Path) -> dict[str, Any]:
    """Save, and return the section of the report."""
    model.save_pretrained(folder)
    args = SimpleNamespace(should_save=True, device=torch.device("cpu"))
    oft.ascend_saved(run=run, trainer=SimpleNamespace(args=args))
    section: dict[str, Any] = oft.ascend_report_sections(run=run)["oft"]
    return section


def train(model: PeftModel, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-2)
    for _ in range(steps):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def new(folder: Path, series: bool = True) -> PeftModel:
    """A model as the host builds it."""
    return with_peft(folder, init_weights=True, use_cayley_neumann=series)


def messages(run: Run) -> str:
    return "\n".join(finding.message for finding in run.findings)


@pytest.mark.parametrize("name", ["qwen2", "qwen25vl", "qwen3_5"])
def test_a_new_adapter_is_exact_and_stock_peft_loads_and_merges_it(
    assets: Path, tmp_path: Path, name: str
) -> None:
    model, run = new(assets / name), make_run(tmp_path)
    prepare(run, model)
    assert run.decisions[SUBJECT].choice == EXACT
    train(model)
    section = save(run, model.eval(), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_cayley_neumann"] is False
    assert 0 < section["orthogonality"] < 1e-6
    assert messages(run) == ""
    expected = logits(model)
    assert (expected - logits(load(assets / name).eval())).abs().max() > 1e-2
    stock = PeftModel.from_pretrained(load(assets / name), tmp_path).eval()
    assert torch.allclose(logits(stock), expected, atol=1e-4)
    assert torch.allclose(logits(stock.merge_and_unload()), expected, atol=1e-4)
    assert torch.allclose(logits(model.merge_and_unload()), expected, atol=1e-4)


def test_pefts_series_on_request(assets: Path, tmp_path: Path) -> None:
    model, run = new(assets / "qwen2"), make_run(tmp_path, oft={"exact_cayley": False})
    prepare(run, model)
    train(model)
    assert run.decisions[SUBJECT].choice == SERIES
    assert model.peft_config["default"].use_cayley_neumann
    assert "forward" not in vars(model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj"))
    section = save(run, model, tmp_path)
    assert section["orthogonality"] > 1e-3
    assert f"the rotations in {tmp_path} are not orthogonal" in messages(run)
    assert "exact_cayley: true" in messages(run)


def test_an_adapter_that_goes_on_keeps_its_convention(assets: Path, tmp_path: Path) -> None:
    for series in (True, False):
        folder = tmp_path / str(series)
        with_peft(assets / "qwen2", use_cayley_neumann=series).save_pretrained(folder)
        model = PeftModel.from_pretrained(load(assets / "qwen2"), folder, is_trainable=True)
        expected = logits(model)
        run = make_run(tmp_path, adapter_name_or_path=[str(folder)])
        prepare(run, model)
        assert run.decisions[SUBJECT].choice == (SERIES if series else EXACT)
        assert torch.allclose(logits(model), expected, atol=1e-5)
        assert ("the adapter was trained with PEFT's series" in messages(run)) is series


@pytest.mark.parametrize("series", [True, False])
def test_a_resumed_run_takes_the_convention_of_its_checkpoint(
    assets: Path, tmp_path: Path, series: bool
) -> None:
    """The Trainer loads the weights of a checkpoint into the new adapter, and not its configuration."""
    checkpoint = tmp_path / "checkpoint-2"
    trained = with_peft(assets / "qwen2", use_cayley_neumann=series)
    trained.save_pretrained(checkpoint)
    model, run = new(assets / "qwen2"), make_run(tmp_path, resume_from_checkpoint=str(checkpoint))
    prepare(run, model)
    model.load_adapter(checkpoint, "default", is_trainable=True)
    assert torch.allclose(logits(model), logits(trained), atol=1e-5)
    assert run.decisions[SUBJECT].choice == (SERIES if series else EXACT)


def test_a_peft_that_rotates_otherwise_is_left_alone(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OFTRotationModule._cayley_batch
    monkeypatch.setattr(OFTRotationModule, "_cayley_batch", lambda *args: own(*args).mT)
    model, run = new(assets / "qwen2"), make_run()
    prepare(run, model)
    assert run.decisions[SUBJECT].choice == SOLVED
    assert "forward" not in vars(model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj"))
    assert "its exact rotations are others than those of the releases that are known here" in messages(run)
    with pytest.raises(AscendError, match="install peft"):
        prepare(make_run(oft={"exact_cayley": True}), new(assets / "qwen2"))


def test_module_dropout_is_refused() -> None:
    run = make_run(module_dropout=0.1)
    with pytest.raises(AscendError, match=r"`module_dropout: 0\.1` has no effect"):
        oft.ascend_arguments(run=run, arguments=run.arguments)
    run = make_run(module_dropout=0.1, finetuning_type="lora")
    oft.ascend_arguments(run=run, arguments=run.arguments)


def test_fsdp1_is_left_to_peft_and_said() -> None:
    fsdp = {"fsdp": ["full_shard"], "fsdp_plugin_args": {"fsdp_version": 1}}
    fsdp |= {"use_cpu": False, "device": torch.device("meta")}
    run = make_run(**fsdp)
    oft.ascend_arguments(run=run, arguments=run.arguments)
    assert run.decisions[SUBJECT].choice == SERIES
    assert "FSDP1 has each OFT weight whole in its own layer only" in messages(run)
    for asked in ({"strict": True}, {"oft": {"exact_cayley": True}}):
        run = make_run(**asked, **fsdp)
        with pytest.raises(AscendError, match="FSDP1"):
            oft.ascend_arguments(run=run, arguments=run.arguments)


class Widths(nn.Module):
    """Linear modules of the widths that PEFT adjusts block 32 for."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.visual = nn.ModuleDict({"q_proj": nn.Linear(64, 8), "down_proj": nn.Linear(3420, 8)})
        self.o_proj = nn.Linear(odd, 8)


def adapted(odd: int, size: int = 32) -> PeftModel:
    return get_peft_model(Widths(odd), config(oft_block_size=size, task_type=None))


def test_block_sizes_are_said_where_peft_adjusts_them(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    model = adapted(64)
    prepare(run, model)
    assert blocks.describe(blocks.sizes(model)) == (
        "block size 32 in 2 layers; 30 in 1 x vision down_proj (width 3420)"
    )
    assert run.facts["oft"]["blocks"] == [
        {"layers": "vision q_proj", "width": 64, "block_size": 32, "count": 1},
        {"layers": "vision down_proj", "width": 3420, "block_size": 30, "count": 1},
        {"layers": "text o_proj", "width": 64, "block_size": 32, "count": 1},
    ]


def test_blocks_of_size_one_are_refused() -> None:
    with pytest.raises(AscendError) as error:
        prepare(make_run(), adapted(67))
    assert "OFT would do nothing in 1 of 3 layers" in str(error.value)
    assert "width 67 is 1 (o_proj)" in str(error.value)
    assert "next: `oft_target: down_proj,q_proj`, or an `oft_block_size` that divides" in str(error.value)
    assert str(error.value).endswith(": 67")


def test_blocks_that_a_cpu_merges_wrongly_are_said() -> None:
    run = make_run()
    blocks.warn(run, [blocks.Block("model.layers.0.mlp.down_proj", 512, 150)])
    assert messages(run) == ""
    blocks.warn(run, [blocks.Block("model.layers.0.mlp.down_proj", 512, 256)])
    assert "OMP_NUM_THREADS=1" in messages(run)
