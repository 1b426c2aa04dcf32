"""The block leaves before the host's parser, from every form a recipe can take."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llamafactory_ascend import run
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.report import lifecycle

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from llamafactory.hparams import parser  # noqa: E402

from tests.fake_host import write_plugin  # noqa: E402

RECIPE = {"model_name_or_path": "m", "template": "default", "output_dir": "o", "dataset": "d"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_plugin(tmp_path / "site", "log", "")
    run.current.cache_clear()
    yield
    lifecycle.leave()  # a training that was only begun


def put(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", *words])


def save(name: str, **changes: Any) -> str:
    recipe = {**RECIPE, **changes}
    Path(name).write_text(
        json.dumps(recipe) if name.endswith("json") else yaml.safe_dump(recipe), encoding="utf-8"
    )
    return name


def host_words() -> list[str]:
    return [word for key, value in RECIPE.items() for word in (f"--{key}", value)]


def test_json_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9.5 hands a Path to `json.load`; a version that does not is no worse off."""
    put(monkeypatch, save("x.json", ascend={"strict": True}), "cutoff_len=77")
    if not hasattr(parser, "get_use_kt"):  # 0.9.5
        with pytest.raises(AttributeError, match="'PosixPath' object has no attribute 'read'"):
            parser.read_args.__wrapped__()
    _model, data, *_ = parser._parse_train_args()
    assert (data.dataset, data.cutoff_len) == (["d"], 77)
    assert run.current().settings.strict is True


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("x.yaml", {"ascend": {"strict": True}}, []),
        ("x.yml", {"ascend.strict": True}, []),
        ("x.json", {"ascend": {"strict": True}}, []),
        ("x.json", {"ascend.strict": True}, []),
        ("x.yaml", {}, ["ascend.strict=true"]),
        ("x.yaml", {}, ["--ascend.strict", "true"]),
        ("x.yaml", {"ascend": {"strict": False}}, ["--ascend.strict=true"]),
        ("x.json", {}, ["cutoff_len=9", "--ascend.strict", "true"]),
        ("", {}, ["--ascend.strict", "true"]),
        ("", {}, ["--ascend.strict=true"]),
    ],
)
def test_every_form(
    monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], words: list[str]
) -> None:
    put(monkeypatch, *([save(name, **changes)] if name else host_words()), *words, *every_tenth(name))
    before = list(sys.argv)
    _model, data, training, *_ = parser._parse_train_args()
    found = run.current().settings
    assert (found.strict, found.plugins) == (True, {"log": {"every": 10}})
    assert (data.dataset, training.output_dir) == (["d"], "o")
    assert sys.argv == before


def every_tenth(name: str) -> list[str]:
    """A nested key in the form that goes with the recipe."""
    return ["ascend.plugins.log.every=10"] if name else ["--ascend.plugins.log.every", "10"]


def test_stock_refuses_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, save("x.yaml", ascend={"strict": True}))
    stock = parser._parse_args.__wrapped__
    with pytest.raises(ValueError, match="Some keys are not used by the HfArgumentParser: \\['ascend'\\]"):
        stock(parser.HfArgumentParser(parser._TRAIN_ARGS))


@pytest.mark.parametrize("off", ["ascend.checkpointing=off", "--ascend.checkpointing=off"])
def test_off_arrives_as_false(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    put(monkeypatch, save("x.yaml"), off)
    parser._parse_train_args()
    assert run.current().settings.checkpointing == "off"


def test_dict_as_a_ray_worker_gets_it() -> None:
    """What `read_args` returned in the driver, block included, arrives in the worker's `get_train_args`."""
    args = {**RECIPE, "ascend": {"checkpointing": False}}
    parser._parse_train_args(args)
    assert run.current().settings.checkpointing == "off"
    assert args["ascend"] == {"checkpointing": False}, "the caller's dict is its own"


def test_read_args_keeps_the_block_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, save("x.yaml"), "--ascend.strict", "true")
    assert parser.read_args() == {**RECIPE, "ascend": {"strict": True}}


@pytest.mark.parametrize("words", [["ascend.checkpointng=full"], ["--ascend.checkpointng", "full"]])
@pytest.mark.parametrize("extra", ["0", "1"])
def test_mistake_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], extra: str
) -> None:
    """Also with ALLOW_EXTRA_ARGS, which makes the host swallow unknown keys, and for Ray's arguments."""
    monkeypatch.setenv("ALLOW_EXTRA_ARGS", extra)
    put(monkeypatch, save("x.yaml"), *words)
    for parse in (parser._parse_train_args, parser._parse_infer_args, parser.get_ray_args):
        with pytest.raises(SystemExit) as stop:
            parse()
        assert stop.value.code == 2
        assert capsys.readouterr().err == (
            "[llamafactory-ascend] command line: unknown key `ascend.checkpointng`: "
            "did you mean `checkpointing`?\n"
        )


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"ascend": {"plugins": {"lgo": {}}}}, [], "x.yaml: `ascend.plugins.lgo`"),
        ({}, ["ascend.plugins.lgo.every=3"], "command line: `ascend.plugins.lgo`"),
    ],
)
def test_settings_of_a_plugin_that_is_not_installed_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    put(monkeypatch, save("x.yaml", **changes), *words)
    with pytest.raises(SystemExit) as stop:
        parser._parse_train_args()
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        f"[llamafactory-ascend] {message}: there is no plugin `lgo`: did you mean `log`?\n"
        "  next: install it, or remove its settings\n"
    )


def test_word_without_value_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, save("x.yaml"), "--ascend.strict")
    with pytest.raises(SystemExit) as stop:
        parser._parse_train_args()
    assert stop.value.code == 2
    assert "`--ascend.strict` has no value" in capsys.readouterr().err


def test_inference_commands() -> None:
    """export, chat and api parse through the same function: the block is taken out and otherwise inert."""
    model, *_ = parser._parse_infer_args(
        {"model_name_or_path": "m", "template": "default", "ascend": {"strict": True}}
    )
    assert model.model_name_or_path == "m"
    assert run.current().arguments is None


def test_a_second_training_of_a_process_keeps_its_own_decisions(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:256")
    recipe = {**RECIPE, "do_train": True, "stage": "sft", "finetuning_type": "lora"}
    recipe |= {"dataset": "tiny", "dataset_dir": str(assets / "data")}
    for folder in ("first", "second"):
        parser.get_train_args({**recipe, "output_dir": folder})
        decisions = json.loads((Path(folder) / "ascend_report.json").read_text())["decisions"]
        assert decisions["environment.PYTORCH_NPU_ALLOC_CONF"]["choice"] == "max_split_size_mb:256"


def test_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The v1 trainers get their arguments without the block; it has no effect, and that is said."""
    from llamafactory.v1.config import get_args

    Path("v1.yaml").write_text("model: m\nascend: {checkpointing: full}\n")
    put(monkeypatch, "v1.yaml", "--ascend.plugins.log.every", "3")
    with pytest.raises(ValueError, match="ascend"):
        get_args.__wrapped__({"model": "m", "ascend": {}})
    model, *_ = get_args()
    assert model.model == "m"
    assert [finding.message for finding in run.current().findings] == [
        "the v1 trainers of the host are not covered: the `ascend:` block has no effect (unset USE_V1)"
    ]
    with pytest.raises(AscendError, match="not covered"):
        get_args({"model": "m", "ascend": {"strict": True}})
    run.current.cache_clear()
    get_args({"model": "m"})
    assert run.current().findings == []
