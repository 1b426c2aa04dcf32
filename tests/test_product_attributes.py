"""Pictures of products: the data set, and both Qwen2.5-VL recipes trained on it on two kinds of device."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from llamafactory_ascend import demo_data, product_attributes, resources
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.product_attributes import drawing, products, questions
from tests.conftest import SIMULATOR_MISSING
from tests.running import BIN, Result, environment

OFT, LORA = "qwen2_5_vl_7b_oft_vision", "qwen2_5_vl_7b_lora_vision_last6"
STEPS = 3
TOLERANCE = 2e-3  # relative; on an NPU sums are added in another order, in bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("products") / "data"
    demo_data.make("product_attributes", made)
    return made


def rows(file: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_rows_that_are_made_are_the_rows_that_are_shipped(folder: Path) -> None:
    for name in ("product_attributes.json", "product_attributes_eval.json"):
        assert (folder / name).read_bytes() == (resources.folder("dataset_info") / name).read_bytes()


def test_no_product_of_the_evaluation_is_trained_on(folder: Path) -> None:
    train, evaluation = (rows(folder / f"product_attributes{part}.json") for part in ("", "_eval"))
    assert (len(train), len(evaluation)) == (320, 80)
    pictures = [{image for row in part for image in row["images"]} for part in (train, evaluation)]
    assert [len(part) for part in pictures] == [160, 40] and not pictures[0] & pictures[1]
    seen = [hashlib.sha256((folder / image).read_bytes()).digest() for part in pictures for image in part]
    assert len(set(seen)) == 200, "two pictures are the same"
    combinations = [{(p.kind, p.colour, p.count, p.flaw) for p in part} for part in products.split(0)]
    assert not combinations[0] & combinations[1]
    for part in products.split(0):
        for values, key in ((products.KINDS, "kind"), (products.COLOURS, "colour"), (products.FLAWS, "flaw")):
            assert {getattr(product, key) for product in part} == set(values)
        assert {product.count for product in part} == {1, 2, 3, 4, 5}


def test_every_row_has_its_picture_and_one_place_for_it(folder: Path) -> None:
    kinds: Counter[int] = Counter()
    for part in ("", "_eval"):
        for row in rows(folder / f"product_attributes{part}.json"):
            roles = [message["role"] for message in row["messages"]]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert "".join(m["content"] for m in row["messages"]).count("<image>") == len(row["images"]) == 1
            assert row["messages"][0]["content"].startswith("<image>")
            assert not Path(row["images"][0]).is_absolute() and (folder / row["images"][0]).is_file()
            kinds[len(roles)] += 1
    assert kinds == {2: 300, 4: 100}
    assert Image.open(folder / "product_pictures" / "000.png").size == (336, 224)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size < 2**20, "small enough to be made anywhere"


def test_answers_follow_from_what_is_drawn() -> None:
    flawed = products.Product(1, "cup", "red", 3, "crack", 2)
    sound = products.Product(2, "box", "black", 1, "none", 0)
    said = {name: answer(flawed) for name, answer in questions.ANSWERS.items()}
    assert json.loads(said.pop("attributes")) == {"品类": "杯子", "颜色": "红色", "数量": 3, "瑕疵": "裂纹"}
    assert said == {
        "count": "共有3件杯子。",
        "colour": "是红色的杯子。",
        "flaw": "有瑕疵，是裂纹。",
        "where": "左起第2件。",
        "verdict": "不合格：左起第2件有裂纹。",
    }
    assert [questions.ANSWERS[name](sound) for name in ("flaw", "where", "verdict")] == [
        "没有瑕疵。",
        "没有一件有瑕疵。",
        "合格。",
    ]


@pytest.mark.parametrize("kind", products.KINDS)
@pytest.mark.parametrize("flaw", [flaw for flaw in products.FLAWS if flaw != "none"])
def test_a_flaw_is_seen_on_the_product_that_has_it_alone(kind: str, flaw: str) -> None:
    """In black and in yellow: a line that has the product's colour is no flaw."""
    for colour in ("black", "yellow"):
        sound = np.asarray(drawing.draw(products.Product(7, kind, colour, 3, "none", 0), 0)).astype(int)
        flawed = np.asarray(drawing.draw(products.Product(7, kind, colour, 3, flaw, 3), 0)).astype(int)
        changed = np.abs(sound - flawed).max(axis=2) > 60
        columns = np.flatnonzero(changed.any(axis=0))
        assert changed.sum() >= 40
        assert columns.min() >= drawing.WIDTH // 2 + 24, "the third of three, right of the middle one"


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    product = products.split(3)[0][0]
    assert products.split(3) == products.split(3) != products.split(4)
    assert drawing.draw(product, 3).tobytes() == drawing.draw(product, 3).tobytes()
    assert drawing.draw(product, 3).tobytes() != drawing.draw(product, 4).tobytes()
    product_attributes.write_rows(tmp_path, 3)
    assert (tmp_path / "product_attributes.json").read_bytes() != (
        resources.folder("dataset_info") / "product_attributes.json"
    ).read_bytes()


def test_without_pillow_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(AscendError, match="pip install pillow"):
        demo_data.make("product_attributes", tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_stock_host_finds_rows_and_pictures(folder: Path) -> None:
    """The host's own loading: `media_dir` is `dataset_dir`, and image paths are relative to it."""
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import get_dataset_list
    from llamafactory.hparams import DataArguments

    arguments = DataArguments(dataset_dir=str(folder))
    (attributes,) = get_dataset_list(["product_attributes_eval"], str(folder))
    convert = get_dataset_converter(attributes.formatting, attributes, arguments)
    row = convert(rows(folder / "product_attributes_eval.json")[0])
    assert row["_images"] == [str(folder / "product_pictures" / "160.png")]
    assert row["_prompt"][0]["content"].startswith("<image>") and row["_response"][0]["content"].startswith(
        "{"
    )


class Runs:
    """``llamafactory-cli train ascend:NAME`` with a tiny model; what it adapts is the recipe's own."""

    def __init__(self, model: Path, data: Path, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.done: dict[tuple[str, bool], Result] = {}

    def __call__(self, name: str, npu: bool) -> Result:
        if npu and SIMULATOR_MISSING:
            pytest.skip(SIMULATOR_MISSING)
        if (name, npu) not in self.done:
            self.done[name, npu] = self.train(name, npu)
        return self.done[name, npu]

    def train(self, name: str, npu: bool) -> Result:
        output = self.folder / f"{name}-{'npu' if npu else 'cpu'}"
        changes = {
            "model_name_or_path": self.model,
            "dataset_dir": self.data,
            "output_dir": output,
            "max_samples": 2,
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "learning_rate": {OFT: "1e-2", LORA: "1e-3"}[name],
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "logging_steps": 1,
            "save_strategy": "'no'",
            "eval_strategy": "'no'",
            "eval_dataset": "null",
            "ascend.strict": "true",
        }
        words = [f"{key}={value}" for key, value in changes.items()]
        if not npu:
            words.append("use_cpu=true")  # without it Transformers refuses bf16 on a CPU
        process = subprocess.run(
            [str(BIN / "llamafactory-cli"), "train", f"ascend:{name}", *words],
            env=environment(npu=npu),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            cwd=self.folder,
        )
        return Result(process.returncode, process.stdout, output, [])


@pytest.fixture(scope="module")
def run(assets: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Eight vision blocks and eight decoder layers, so that `last:6` of the recipe means something."""
    return Runs(assets / "vlm", folder, tmp_path_factory.mktemp("runs"))


def adapter(result: Result) -> Counter[str]:
    """Return adapted module -> tensors, its path as from `model.`."""
    with safe_open(result.output / "adapter_model.safetensors", "pt") as file:
        names = [name.removeprefix("base_model.model.model.") for name in file.keys()]  # noqa: SIM118
    return Counter(name.partition(".lora_")[0].partition(".oft_")[0] for name in names)


@pytest.mark.parametrize("name", [OFT, LORA])
@pytest.mark.parametrize("npu", [False, True], ids=["cpu", "simulated_npu"])
def test_shipped_recipe_learns(name: str, npu: bool, run: Runs) -> None:
    result = run(name, npu)
    assert result.code == 0, result.text
    losses = result.losses
    assert len(losses) == STEPS and all(after < before for before, after in itertools.pairwise(losses))
    assert losses[-1] < 0.97 * losses[0]
    assert result.report["decisions"]["recipe"]["choice"] == name
    assert result.report["device"]["type"] == ("npu" if npu else "cpu")


def test_oft_sits_on_the_attention_of_every_vision_block_and_nowhere_else(run: Runs) -> None:
    found = adapter(run(OFT, False))
    assert found == {f"visual.blocks.{n}.attn.{leaf}": 1 for n in range(8) for leaf in ("qkv", "proj")}


def test_lora_sits_on_text_attention_and_the_last_six_vision_blocks(run: Runs) -> None:
    found = adapter(run(LORA, False))
    text = [f"language_model.layers.{n}.self_attn.{leaf}_proj" for n in range(8) for leaf in "qkvo"]
    vision = [f"visual.blocks.{n}.attn.{leaf}" for n in range(2, 8) for leaf in ("qkv", "proj")]
    assert found == dict.fromkeys([*text, *vision], 2)
    config = json.loads((run(LORA, False).output / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"]) == (32, 64)


@pytest.mark.parametrize("name", [OFT, LORA])
def test_the_same_file_trains_alike_on_both_kinds_of_device(name: str, run: Runs) -> None:
    cpu, npu = run(name, False), run(name, True)
    assert npu.losses == pytest.approx(cpu.losses, rel=TOLERANCE)
    assert npu.losses[-1] != npu.losses[0] and adapter(npu) == adapter(cpu)
