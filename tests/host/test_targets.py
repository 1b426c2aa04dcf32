"""The host's choice of modules beside ours, with its own functions on the tiny models."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from llamafactory_ascend import run as run_module
from llamafactory_ascend import settings
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import targets
from llamafactory_ascend.report import lifecycle

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from llamafactory.hparams import FinetuningArguments, ModelArguments, parser  # noqa: E402
from llamafactory.model.adapter import init_adapter  # noqa: E402

from tests.features.test_kernels import forget  # noqa: E402
from tests.running import Result, Train  # noqa: E402
from tests.training import load  # noqa: E402

ONLY_VISION = {"vision": {"modules": ["attn.qkv", "attn.proj"]}}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[run_module.Run]:
    run_module.current.cache_clear()
    yield run_module.current()
    forget()  # parsing a recipe on the simulated NPU puts kernels into this process
    lifecycle.leave()
    run_module.current.cache_clear()


Adapt = Callable[..., Any]


@pytest.fixture
def adapt(assets: Path) -> Adapt:
    """``adapt(block, model=NAME, adapter=PATH, **finetuning)``: a model with adapters, as in a run."""

    def build(block: Any = None, model: str = "qwen25vl", adapter: Any = None, **changes: Any) -> Any:
        now = run_module.current()
        now.settings = settings.read({"targets": block} if block else None, "x.yaml")
        now.given = frozenset(changes)
        finetuning = FinetuningArguments(**{"finetuning_type": "lora", **changes})
        folder = assets / model
        arguments = ModelArguments(model_name_or_path=str(folder), adapter_name_or_path=adapter)
        training = SimpleNamespace(do_train=True)
        now.arguments = run_module.Arguments(arguments, None, training, finetuning, None)
        targets.ascend_arguments(run=now, arguments=now.arguments)
        loaded = load(folder)
        adapted = init_adapter(loaded.config, loaded, arguments, finetuning, is_trainable=True)
        targets.ascend_after_model(run=now, model=adapted)
        return adapted

    return build


def warnings(now: run_module.Run) -> list[str]:
    return [finding.message for finding in now.findings if finding.level == "warning"]


METHODS: list[dict[str, Any]] = [
    {"finetuning_type": "lora", "lora_rank": 4},
    {"finetuning_type": "oft", "oft_block_size": 8, "oft_rank": 0},
]


@pytest.mark.parametrize("method", METHODS, ids=["lora", "oft"])
def test_substrings_of_the_host(adapt: Adapt, fresh: run_module.Run, method: dict[str, Any]) -> None:
    """`qkv,proj` also adapts 28 modules of the language model: q_proj to down_proj of four layers."""
    adapt(**method, lora_target="qkv,proj", freeze_vision_tower=False)
    found = fresh.facts["targets"]
    assert found["from"] == "lora_target"
    assert found["matched"] == {"qkv": {"vision": 2}, "proj": {"text": 28, "vision": 8}}
    assert found["modules"] == {"text": 28, "vision": 10}
    crossing, parts = warnings(fresh)
    assert crossing.startswith(
        "`lora_target: proj` adapts 28 modules of text and 8 modules of vision (name th"
    )
    assert "adapts 34 modules that have it as a part of another name (gate_proj, up_proj, down_proj" in parts


@pytest.mark.parametrize("method", METHODS, ids=["lora", "oft"])
def test_exact_targets(
    adapt: Adapt,
    fresh: run_module.Run,
    method: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("llamafactory_ascend"), "propagate", True)
    model = adapt(ONLY_VISION, **method)
    trained = {name.partition(".base_layer")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name.removeprefix("base_model.model.").rpartition(".attn.")[0] for name in trained} == {
        "model.visual.blocks.0",
        "model.visual.blocks.1",
    }
    found = fresh.facts["targets"]
    assert found["modules"] == {"vision": 4}
    assert sum(found["trainable"].values()) == model.get_nb_trainable_parameters()[0]
    assert fresh.decisions["targets"].choice == "vision attn.qkv, attn.proj"
    assert warnings(fresh) == []  # freeze_vision_tower: true is a default
    lines = [line.split() for line in caplog.text.splitlines()]
    assert ["vision", "attn.qkv", "2"] in lines
    assert ["adapted", "4"] in lines
    assert "Found linear modules" not in caplog.text


def test_the_host_by_itself(adapt: Adapt, fresh: run_module.Run) -> None:
    """`all` with its defaults: the text model, nothing to warn of."""
    adapt()
    assert fresh.facts["targets"]["matched"] == {"all": {"text": 28}}
    assert warnings(fresh) == []


def test_freeze_flags_of_the_user(adapt: Adapt, fresh: run_module.Run) -> None:
    adapt(ONLY_VISION, freeze_vision_tower=True, freeze_trainable_layers=2)
    assert [one.partition(":")[0] for one in warnings(fresh)] == [
        "`freeze_vision_tower",
        "`freeze_trainable_layers` has no effect with `finetuning_type",
    ]
    assert fresh.facts["targets"]["modules"] == {"vision": 4}


def test_what_is_left_out_is_a_note(adapt: Adapt, fresh: run_module.Run) -> None:
    adapt({"vision": {"modules": "proj"}})
    assert [finding.message for finding in fresh.findings] == [
        "`vision proj` leaves out model.visual.patch_embed.proj (Conv3d)"
    ]


def test_resuming_an_adapter(adapt: Adapt, fresh: run_module.Run, tmp_path: Path) -> None:
    """The adapter decides: the same targets pass, others are refused, without any it is shown."""
    adapt(ONLY_VISION).save_pretrained(tmp_path)
    path = str(tmp_path)
    adapt(ONLY_VISION, adapter=path)
    assert fresh.facts["targets"]["from"] == "ascend.targets"
    adapt(adapter=path)
    assert fresh.facts["targets"]["from"] == f"the adapter {path}"
    assert fresh.facts["targets"]["matched"] == {"qkv": {"vision": 2}, "proj": {"vision": 2}}
    text = {"text": {"modules": "q_proj"}}
    with pytest.raises(AscendError, match=r"(?s)4 modules that it names have none.*4 others .*create_new_ad"):
        adapt(text, adapter=path)
    fresh_one = adapt(text, adapter=path, create_new_adapter=True)
    assert fresh.facts["targets"]["modules"] == {"text": 4}
    assert len(fresh_one.targeted_module_names) == 4


def test_a_module_that_is_trained_whole_gets_no_adapter(adapt: Adapt) -> None:
    with pytest.raises(
        AscendError, match=r"(?s)1 modules that it names have none, e.g. lm_head.*additional_ta"
    ):
        adapt({"text": {"modules": ["q_proj", "lm_head"]}}, additional_target="lm_head")


def test_a_host_that_does_not_ask(adapt: Adapt, fresh: run_module.Run) -> None:
    """Nothing is trained by the host's own choice where the recipe names modules."""
    model = adapt()
    fresh.settings = settings.read({"targets": ONLY_VISION}, "x.yaml")
    with pytest.raises(AscendError, match=r"the host did not ask for target modules"):
        targets.ascend_after_model(run=fresh, model=model)


def test_a_choice_of_the_host_written_beside_ours(train: Train) -> None:
    """`lora_target: all` is the default, and a contradiction where somebody wrote it."""
    recipe = train.recipe(
        model="qwen25vl", template="qwen2_vl", lora_target=None, ascend={"targets": ONLY_VISION}
    )
    parser.get_train_args(recipe)
    with pytest.raises(
        AscendError, match=r"(?s)`lora_target: all` and `ascend.targets`.*remove `lora_target`"
    ):
        parser.get_train_args({**recipe, "lora_target": "all"})


def run_on_images(train: Train, block: dict[str, Any], **changes: Any) -> Result:
    common = {
        "model": "qwen25vl",
        "template": "qwen2_vl",
        "dataset": "tiny_mm",
        "lora_target": None,
        "max_steps": 1,
    }
    done = train(npu=False, ascend={"targets": block}, **common, **changes)
    assert done.code == 0, done.text
    assert done.report["ranks"][0]["gradients"]["unexplained"] == []
    return done


def test_the_command(train: Train) -> None:
    """Text attention and the last vision block: log, report and adapter file; serving tools read a list."""
    vision = {"modules": ["attn.qkv", "attn.proj"], "blocks": "last:1"}
    done = run_on_images(train, {"text": {"modules": "attention"}, "vision": vision})
    section = done.report["ranks"][0]["targets"]
    assert section["modules"] == {"text": 16, "vision": 2}
    assert section["matched"]["vision attn.qkv (blocks last:1)"] == {"vision": 1}
    # rank 8; q and o are 64 x 64, k and v 64 x 32, qkv 64 x 192, proj 64 x 64
    expected = {"text": 4 * 8 * (2 * 128 + 2 * 96), "vision": 8 * (256 + 128)}
    assert section["trainable"] == expected
    total = sum(expected.values())
    assert f"trainable params: {total:,} || all params: {section['parameters']:,} " in done.text  # the host's
    assert re.search(r"vision attn.qkv \(blocks last:1\) +0 +1\n", done.text)
    config = json.loads((done.output / "adapter_config.json").read_text(encoding="utf-8"))
    assert isinstance(config["target_modules"], list)
    with safe_open(done.output / "adapter_model.safetensors", "pt") as file:
        adapted = {key.rpartition(".lora_")[0] for key in file.keys()}  # noqa: SIM118
    assert len(adapted) == 18
    assert all("visual.blocks.1.attn" in key for key in adapted if "visual" in key)


def test_the_command_with_oft(train: Train) -> None:
    method = {"finetuning_type": "oft", "oft_block_size": 8, "oft_rank": 0, "lora_rank": None}
    section = run_on_images(train, ONLY_VISION, **method).report["ranks"][0]["targets"]
    # 64 / 8 rotations of 8 x 7 / 2 angles in each layer
    assert (section["modules"], section["trainable"]) == ({"vision": 4}, {"vision": 4 * 8 * 28})
