"""Before the launcher starts anything: settings are checked, the environment is filled."""

import os
import sys
from pathlib import Path

import pytest

from llamafactory_ascend import run
from llamafactory_ascend.features import environment
from llamafactory_ascend.host import launching
from tests.running import Train


def test_mistake_stops_before_torchrun(train: Train) -> None:
    """Two ranks were asked for: the parent says it once and leaves with 2, torchrun never starts."""
    result = train(ranks=2, ascend={"checkpointng": "full"})
    assert result.code == 2
    assert result.text.count("unknown key `ascend.checkpointng`: did you mean `checkpointing`?") == 1
    assert "distributed tasks" not in result.text
    assert "Traceback" not in result.text
    assert not result.output.exists()


@pytest.mark.parametrize("words", [["none.yaml"], ["broken.yaml"], ["broken.json", "a=1"]])
def test_unreadable_recipe_is_left_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("a: [1\n")
    Path("broken.json").write_text("{")
    assert launching.check(words) == []


def test_check_returns_what_the_host_will_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("output_dir: a\n")
    assert launching.check(["x.yaml", "output_dir=b", "--ascend.strict", "true"]) == {
        "output_dir": "b",
        "ascend": {"strict": True},
    }
    assert launching.check(["--output_dir", "c"]) == ["--output_dir", "c"]


def test_environment_is_filled_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", "--output_dir", "o"])
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    run.current.cache_clear()
    assert launching.launch(lambda: os.environ.get("PYTORCH_NPU_ALLOC_CONF")) == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64")
    assert launching.launch(lambda: os.environ["PYTORCH_NPU_ALLOC_CONF"]) == "max_split_size_mb:64"
    decision = run.current().decisions["environment.PYTORCH_NPU_ALLOC_CONF"]
    assert (decision.choice, decision.reason) == (
        "max_split_size_mb:64",
        "set in the environment; the default is expandable_segments:True",
    )


def test_other_commands_pass_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "version", "--ascend.nonsense"])
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    assert launching.launch(lambda: sys.argv[1:]) == ["version", "--ascend.nonsense"]
    assert "PYTORCH_NPU_ALLOC_CONF" not in os.environ


def test_allocator_default_needs_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.ascend_environment("train") == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("sim_npu")])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert environment.ascend_environment("train") == {}
