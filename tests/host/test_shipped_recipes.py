"""``llamafactory-cli COMMAND ascend:NAME``: the shipped recipe of that name, with overrides behind it."""

import sys
from collections.abc import Iterator

import pytest
import torch
import yaml

from llamafactory_ascend import resources, run

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from llamafactory.hparams import parser  # noqa: E402

from llamafactory_ascend.host import arguments, launching  # noqa: E402

NAME = "qwen2_5_7b_lora_sft"
WORDS = (f"ascend:{NAME}", "learning_rate=5e-5", "--ascend.strict", "true", "output_dir=o")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run.current.cache_clear()
    yield
    run.current.cache_clear()


def put(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", *words])


def test_name_is_read_as_its_file_with_the_overrides_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, *WORDS)
    assert parser.read_args.__wrapped__() == list(WORDS), "stock knows no such recipe"
    recipe = yaml.safe_load(resources.recipe(NAME).read_text(encoding="utf-8"))
    changed = {"learning_rate": 5e-5, "output_dir": "o", "ascend": {"strict": True}}
    assert parser.read_args() == {**recipe, **changed}
    assert sys.argv == ["llamafactory-cli", *WORDS], (
        "torchrun hands them to its ranks, where the same is done"
    )
    _model, data, training, *_ = parser._parse_train_args()
    assert (data.dataset, training.learning_rate) == (["vertical_demo"], 5e-5)
    assert run.current().settings.strict is True
    decision = run.current().decisions["recipe"]
    assert (decision.choice, decision.reason) == (NAME, f"a shipped recipe: {resources.recipe(NAME)}")


def test_launcher_reads_the_same_before_it_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, *WORDS)
    assert launching.check(list(WORDS)) == parser.read_args()


def test_export_takes_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "ascend:qwen2_5_7b_lora_export", "export_dir=merged")
    model, *_ = parser._parse_infer_args()
    assert (model.export_dir, model.adapter_name_or_path) == ("merged", ["saves/qwen2_5_7b_lora_sft"])


@pytest.mark.parametrize("read", [parser.read_args, lambda: launching.check(sys.argv[1:])])
def test_a_name_that_is_not_shipped_ends_the_process(
    read: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, "ascend:qwen3_8_27b")
    with pytest.raises(SystemExit) as stop:
        read()  # type: ignore[operator]
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "[llamafactory-ascend] no recipe `qwen3_8_27b` is shipped: "
        "did you mean `qwen3_8_27b_lora_deltanet_sft_fsdp2` or `qwen3_8_27b_lora_sft_fsdp2` "
        "or `qwen3_8_27b_lora_stress_fsdp2`?\n"
        "  next: llamafactory-ascend recipes ls\n"
    )


def test_a_mistake_in_the_block_names_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, f"ascend:{NAME}")
    with pytest.raises(SystemExit):
        arguments.take_settings({"ascend": {"checkpointng": "full"}})
    assert f"ascend:{NAME}: unknown key `ascend.checkpointng`" in capsys.readouterr().err
