"""``llamafactory-ascend estimate``: a recipe in, bytes by phase out."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml

from llamafactory_ascend.cli.estimate import gib, size
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host import estimate
from tests.running import BIN, Train


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "llamafactory-ascend"), "estimate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_recipe_in_json(assets: Path, tmp_path: Path) -> None:
    """A recipe for two cards, on a machine that has one; it does not fit in a MiB."""
    recipe = tmp_path / "train.yaml"
    written = Train(assets, tmp_path, None).recipe(model="qwen3", template="qwen3_nothink", bf16=True)
    recipe.write_text(yaml.safe_dump(written), encoding="utf-8")
    done = run(str(recipe), "ascend.kernels=off", "--cards", "2", "--memory", "1MiB", "--no-fits", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["cards"], found["sharding"], found["fits"], found["would_fit"]) == (2, "DDP", False, None)
    assert found["batch"] == {"rows": 2, "cutoff_len": 128, "images": 0, "steps": 1}
    assert list(found["phases"]) == ["load", "forward", "backward", "recompute", "optimizer", "saving"]
    peak = max(found["phases"], key=lambda phase: sum(found["phases"][phase].values()))
    assert found["peak"] == {"phase": peak, "bytes": sum(found["phases"][peak].values())}
    trainable, weights = found["model"]["trainable"], found["phases"]["forward"]["weights"]
    assert trainable == 4 * 8 * (64 + 64 + 64 + 32 + 64 + 32 + 64 + 64)  # q, k, v and o of 4 layers, rank 8
    assert weights >= 4 * found["model"]["parameters"]  # the checkpoint is in float32
    assert found["phases"]["forward"]["collectives' buffers"] == 4 * trainable
    assert found["decisions"]["loss"] == "of all logits at once"
    assert not Path(written["output_dir"]).exists()


def test_a_recipe_that_is_not_there() -> None:
    done = run("nowhere.yaml")
    assert done.returncode == 2 and "there is no file nowhere.yaml" in done.stderr


def test_sizes() -> None:
    assert [size(text) for text in ("64GiB", "1.5 gb", "512")] == [64 << 30, 1_500_000_000, 512]
    assert (gib(3 << 29), gib(1 << 20)) == ("1.50 GiB", "1.0 MiB")
    with pytest.raises(typer.BadParameter, match="write 64GiB"):
        size("64 apples")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "dpo"}, "stage dpo cannot be estimated"),
        ({"do_train": False}, "without `do_train: true` cannot"),
        ({"use_galore": True}, "`use_galore`: GaLore cannot be estimated"),
    ],
)
def test_what_cannot_be_estimated_is_refused(changes: dict[str, object], message: str) -> None:
    finetuning = SimpleNamespace(**{"stage": "sft", **changes})
    training = SimpleNamespace(do_train=changes.get("do_train", True))
    arguments: object = SimpleNamespace(finetuning=finetuning, training=training, model=SimpleNamespace())
    with pytest.raises(AscendError, match=message):
        estimate.refuse_unknown(arguments)  # type: ignore[arg-type]
