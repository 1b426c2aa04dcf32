"""The chunked loss in the models of the family table: stock's loss and gradients, without logits."""

import copy
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import loss as feature
from llamafactory_ascend.features.chunked_loss import ChunkedLoss, only_the_loss, unfit
from llamafactory_ascend.run import Arguments, Run
from llamafactory_ascend.settings import Settings
from tests.running import Result, Train, torchrun
from tests.training import ATTENTION, IDS, load

SMOOTHING = "label_smoothing_factor"
MODELS = ("qwen2", "qwen3", "qwen3_5", "qwen25vl", "qwen3_5_moe")
LABELS = IDS.where(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(0)) < 0.6, -100)


def trained(folder: Path) -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False)
    return get_peft_model(load(folder), lora).train()


def step(model: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    model.zero_grad()
    output = model(input_ids=IDS, labels=LABELS, **more)
    output.loss.backward()
    return (
        output.loss.detach(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        output,
    )


@pytest.mark.parametrize("items", [None, 7], ids=["mean", "tokens of the batch"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(assets: Path, name: str, items: int | None) -> None:
    model = trained(assets / name)
    more = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    wanted, gradients, _ = step(model, **more)
    chunked = ChunkedLoss(model.get_base_model())
    found, ours, output = step(model, **more)
    assert chunked.calls == 1 and output.logits is None
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    assert ours.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            ours[key], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()) + 1e-9
        )


def test_logits_are_made_where_somebody_wants_them(assets: Path) -> None:
    model = trained(assets / "qwen3_5")
    wanted = model(input_ids=IDS).logits
    chunked = ChunkedLoss(model.get_base_model())
    assert torch.equal(model(input_ids=IDS).logits, wanted)  # no labels: DPO, generation
    model.eval()
    assert torch.equal(model(input_ids=IDS, labels=LABELS).logits, wanted)  # metrics may want them
    assert chunked.calls == 0
    with only_the_loss(chunked, True):
        assert model(input_ids=IDS, labels=LABELS).logits is None
    assert chunked.calls == 1 and not chunked.loss_only


def test_trained_head_gets_its_gradient(assets: Path) -> None:
    model = load(assets / "qwen2").train()
    _, gradients, _ = step(model)
    ChunkedLoss(model)
    _, ours, _ = step(model)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("peft", [True, False])
def test_a_copy_has_a_loss_of_its_own_and_a_pickle_is_stocks(assets: Path, peft: bool) -> None:
    model = trained(assets / "qwen2") if peft else load(assets / "qwen2").train()
    wanted, gradients, _ = step(model)
    names = list(model.state_dict())
    chunked = ChunkedLoss(model.get_base_model() if peft else model)
    step(model)
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    inner = twin.get_base_model() if peft else twin
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other, logits in ((twin, False), (torch.load(file, weights_only=False), True)):
        found, ours, output = step(other)
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
        for name, gradient in gradients.items():
            difference = (ours[name] - gradient).norm()
            assert difference <= 1e-4 * gradient.norm()
        assert (output.logits is not None) == logits
    assert (chunked.calls, inner.ascend_chunked_loss.calls) == (1, 2)  # the twin came with the one made here
    with torch.no_grad():
        inner.lm_head.weight.zero_()
    assert step(twin)[0] == pytest.approx(math.log(inner.config.vocab_size), rel=1e-6)
    torch.testing.assert_close(step(model)[0], wanted, rtol=2e-6, atol=0)


def test_a_vocabulary_that_is_resized_later_has_stocks_loss(assets: Path) -> None:
    model, stock = load(assets / "qwen2").train(), load(assets / "qwen2").train()
    chunked = ChunkedLoss(model)
    for one in (model, stock):
        torch.manual_seed(0)
        one.resize_token_embeddings(one.config.vocab_size + 8)
    assert torch.equal(step(model)[0], step(stock)[0])
    assert chunked.calls == 0


@pytest.mark.parametrize(
    "more",
    [
        {"labels": torch.full_like(IDS, -100), "num_items_in_batch": 7},
        {"labels": torch.full_like(IDS, 639)},
        {"shift_labels": LABELS.roll(-1, 1)},
        {"return_dict": False},
    ],
    ids=["nothing supervised on this rank", "last word", "shifted by the caller", "tuple"],
)
def test_what_callers_ask_for(assets: Path, more: dict[str, Any]) -> None:
    found = []
    for chunk in (False, True):
        model = load(assets / "qwen2").train()
        assert model.config.vocab_size == 640
        chunked = ChunkedLoss(model) if chunk else None
        loss = model(**{"input_ids": IDS, "labels": LABELS, **more})[0]
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    assert chunked is not None and chunked.calls == 1
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-6, atol=0)
    for ours, stock in zip(found[1][1], found[0][1], strict=True):
        assert (ours - stock).norm() <= 1e-4 * stock.norm()


def test_model_whose_head_is_not_plain_is_left_alone(assets: Path) -> None:
    model = load(assets / "qwen2")
    assert unfit(model) == ""
    model.lm_head.register_forward_hook(lambda module, args, output: output.float())
    assert unfit(model) == "somebody else acts on the output of its head"
    model.lm_head = nn.Sequential(model.lm_head)
    assert unfit(model) == "its head is a Sequential, not a plain linear layer"


def decide(assets: Path, setting: str = "auto", kernels: str = "auto", **changes: Any) -> Run:
    """Run the hook as the loader does, with the host's arguments as far as it looks at them."""
    found = {"stage": "sft", "device": "npu", "deepspeed": None, "torch_compile": False, **changes}
    training = {name: found.pop(name, None) for name in ("deepspeed", "torch_compile", SMOOTHING)}
    device = SimpleNamespace(type=found.pop("device"))
    nothing: Any = SimpleNamespace()
    now = Run(settings=Settings(loss=setting, kernels=kernels))
    now.arguments = Arguments(
        nothing, nothing, SimpleNamespace(device=device, **training), SimpleNamespace(**found), nothing
    )
    feature.ascend_after_model(now, load(assets / "qwen2"))
    return now


def test_auto_is_for_npus_and_for_losses_of_the_model(assets: Path) -> None:
    found = decide(assets)
    assert found.decisions["loss"].choice == "in chunks of the supervised positions" and feature.current()
    for changes, reason in (
        ({"device": "cpu"}, "`auto` leaves the loss as it is on a CPU"),
        ({"kernels": "off"}, "`auto` leaves the loss as it is with `kernels: off`"),
        ({"stage": "rm"}, "stage rm computes on logits"),
        ({"stage": "dpo", "ld_alpha": 0.5}, "`ld_alpha`: it weighs each word's likelihood by its place"),
        ({"use_dft_loss": True}, "`use_dft_loss`: it weighs the loss by the logits"),
        ({"torch_compile": True}, "`torch_compile`: a compiled model is traced past it"),
        ({SMOOTHING: 0.1}, f"`{SMOOTHING}`: the Trainer smooths labels on the logits"),
        ({"setting": "off"}, "`ascend.loss: off`"),
    ):
        found = decide(assets, **changes)
        assert found.decisions["loss"].reason == reason and feature.current() is None, changes


def test_asked_for_by_name_it_works_on_a_cpu_or_is_an_error(assets: Path) -> None:
    assert decide(assets, "chunked", device="cpu").decisions["loss"].reason == "`ascend.loss: chunked`"
    with pytest.raises(AscendError, match=r"`ascend.loss: chunked`: stage ppo computes on logits"):
        decide(assets, "chunked", stage="ppo")


def test_a_reference_model_computes_alike_or_the_report_says_why_not(assets: Path) -> None:
    odd = load(assets / "qwen2")
    odd.lm_head = nn.Sequential(odd.lm_head)
    for reference, choice in (
        (load(assets / "qwen2"), "in chunks of the supervised positions"),
        (odd, "of all logits at once"),
    ):
        now = decide(assets, stage="dpo")
        beside: Any = SimpleNamespace(ref_model=reference)
        feature.ascend_trainer_callbacks(now, beside)
        assert now.decisions["loss.reference"].choice == choice
        assert len(feature.all_of_them()) == 1 + (reference is not odd)
    with pytest.raises(AscendError, match=r"chunked`: reference model: its head is a Sequential"):
        feature.ascend_trainer_callbacks(decide(assets, "chunked", stage="dpo"), beside)


RECIPE = {"eval_dataset": "tiny", "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}


@pytest.fixture(scope="module")
def runs(train_once: Train) -> dict[str, Result]:
    """The same training with all logits and in chunks: two ranks, FSDP2, two batches a step."""
    fsdp = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]},
        "gradient_accumulation_steps": 2,
    }
    start = {"ranks": 2, "command": torchrun(2)}
    return {
        loss: train_once(**start, ascend={"kernels": "off", "loss": loss}, **RECIPE, **fsdp)
        for loss in ("off", "chunked")
    }


def test_training_on_two_ranks_has_the_losses_of_stock(runs: dict[str, Result]) -> None:
    assert [runs[name].code for name in ("off", "chunked")] == [0, 0], runs["chunked"].text[-3000:]
    torch.testing.assert_close(runs["chunked"].losses, runs["off"].losses, rtol=2e-4, atol=0)
    torch.testing.assert_close(runs["chunked"].grad_norms, runs["off"].grad_norms, rtol=2e-3, atol=0)
    evaluations = [
        [entry["eval_loss"] for entry in json.loads(path.read_text())["log_history"] if "eval_loss" in entry]
        for path in (runs[name].output / "trainer_state.json" for name in ("off", "chunked"))
    ]
    assert len(evaluations[0]) == 2
    torch.testing.assert_close(evaluations[1], evaluations[0], rtol=2e-4, atol=0)


def test_every_rank_computed_it_in_both_halves_of_the_step(runs: dict[str, Result]) -> None:
    ranks = runs["chunked"].report["ranks"]
    assert [rank["loss"] for rank in ranks] == [{"calls_in_first_step": 2}] * 2
