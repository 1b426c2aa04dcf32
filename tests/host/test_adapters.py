"""OFT adapters in the host: let in where a LoRA is, loaded as what they are, refused in plain words."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamafactory_ascend import run
from llamafactory_ascend.errors import AscendError

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from llamafactory.hparams import FinetuningArguments, ModelArguments, parser  # noqa: E402
from llamafactory.model import load_model, load_tokenizer  # noqa: E402
from llamafactory.train import trainer_utils  # noqa: E402
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model  # noqa: E402
from peft.tuners.oft.layer import OFTRotationModule  # noqa: E402

from tests.training import IDS, load  # noqa: E402

TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run.current.cache_clear()
    yield
    run.current.cache_clear()


@pytest.fixture(scope="module")
def adapters(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters on the tiny Qwen2 that have learned something, each with a value head."""
    base, root = assets / "qwen2", tmp_path_factory.mktemp("adapters")
    configs = {
        "lora": LoraConfig(r=4, target_modules=TARGETS),
        "oft": OFTConfig(oft_block_size=8, target_modules=TARGETS, use_cayley_neumann=False),
        "series": OFTConfig(oft_block_size=8, target_modules=TARGETS, use_cayley_neumann=True),
    }
    for name, config in configs.items():
        model = get_peft_model(load(base), config)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(root / name)
        head = {"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.randn(1)}
        save_file(head, root / name / "value_head.safetensors")
    return {name: root / name for name in configs}


def arguments(base: Path, adapter: Path | str | None, **finetuning: Any) -> tuple[Any, Any]:
    model = ModelArguments(
        model_name_or_path=str(base), adapter_name_or_path=str(adapter) if adapter else None
    )
    model.compute_dtype, model.device_map = torch.float32, {"": torch.device("cpu")}
    return model, FinetuningArguments(**finetuning)


def build(base: Path, adapter: Path | str | None, trainable: bool = False, **changes: Any) -> Any:
    """What the host's loader makes of a base model and an adapter."""
    value_head = changes.pop("add_valuehead", False)
    model, finetuning = arguments(base, adapter, **changes)
    tokenizer = load_tokenizer(model)["tokenizer"]
    return load_model(tokenizer, model, finetuning, trainable, value_head)


def reference(base: Path, *adapters: Path) -> torch.Tensor:
    """Logits of the adapters by PEFT alone; all but the last are merged."""
    model = load(base)
    for adapter in adapters:
        model = PeftModel.from_pretrained(model, adapter)
        if adapter != adapters[-1]:
            model = model.merge_and_unload()
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def infer(base: Path, adapter: Path | str, **changes: Any) -> Any:
    recipe = {
        "model_name_or_path": str(base),
        "adapter_name_or_path": str(adapter),
        "template": "default",
        "finetuning_type": "oft",
        "infer_dtype": "float32",
    }
    return parser.get_infer_args({**recipe, **changes})


def test_stock_refuses_an_oft_adapter(assets: Path, adapters: dict[str, Path]) -> None:
    model, finetuning = arguments(assets / "qwen2", adapters["oft"], finetuning_type="oft")
    with pytest.raises(ValueError, match="Adapter is only valid for the LoRA method"):
        parser._verify_model_args.__wrapped__(model, None, finetuning)
    parser._verify_model_args(model, None, finetuning)
    assert finetuning.finetuning_type == "oft"


def test_stock_does_not_read_oft_target(assets: Path) -> None:
    """The hook that settles the targets of a training has not run here."""
    model = build(assets / "qwen2", None, trainable=True, finetuning_type="oft", oft_target="q_proj")
    assert sum(name.endswith("oft_R.default.weight") for name, _ in model.named_parameters()) == 7 * 4


def test_full_tuning_still_takes_no_adapter(assets: Path, adapters: dict[str, Path]) -> None:
    model, finetuning = arguments(assets / "qwen2", adapters["oft"], finetuning_type="full")
    with pytest.raises(ValueError, match="Adapter is only valid for the LoRA method"):
        parser._verify_model_args(model, None, finetuning)


@pytest.mark.parametrize("kind", ["oft", "lora"])
@pytest.mark.parametrize("written", ["oft", "lora"])
def test_chat_and_export_load_an_adapter_as_what_it_is(
    assets: Path, adapters: dict[str, Path], kind: str, written: str
) -> None:
    *_, finetuning, _ = infer(assets / "qwen2", adapters[kind], finetuning_type=written)
    assert finetuning.finetuning_type == kind
    said = [finding.message for finding in run.current().findings]
    name = {"oft": "an OFT", "lora": "a LoRA"}[kind]
    expected = (
        f"{adapters[kind]} is {name} adapter and is loaded as one; `finetuning_type: {written}` has no "
    )
    expected += "effect on it"
    assert said == ([] if kind == written else [expected])


def test_a_server_that_knows_lora_only_is_not_given_oft(assets: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(AscendError, match="is an OFT adapter, and vllm serves LoRA only") as error:
        infer(assets / "qwen2", adapters["oft"], infer_backend="vllm")
    assert "llamafactory-cli export" in error.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_version": "0.17.1", "use_cayley_neumann": True}, "is of PEFT 0.17.1 below 0.18"),
        ({"peft_version": None, "use_cayley_neumann": True}, "names no peft_version"),
        ({"peft_version": "9.1.0"}, "is of PEFT 9.1.0, but"),
        ({"use_cayley_neumann": ...}, "does not say use_cayley_neumann"),
        ({"oft_block_size": ...}, "has no oft_block_size"),
    ],
    ids=str,
)
def test_an_adapter_that_would_rotate_otherwise_is_refused(
    assets: Path, adapters: dict[str, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """Stock warns about the first two, says nothing of the next two, and loads other outputs."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((adapters["oft"] / name).read_bytes())
    config = {**json.loads((tmp_path / "adapter_config.json").read_text()), **change}
    config = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AscendError) as error:
        infer(assets / "qwen2", tmp_path)
    assert words in str(error.value) and str(tmp_path) in str(error.value)
    allowed = {"ascend": {"oft": {"any_version": True}}}
    if "oft_block_size" in change:  # PEFT itself cannot load it
        with pytest.raises(AscendError):
            infer(assets / "qwen2", tmp_path, **allowed)
    else:
        infer(assets / "qwen2", tmp_path, **allowed)
        assert "is loaded all the same" in run.current().findings[0].message


@pytest.mark.parametrize("name", ["oft", "series", "lora"])
def test_what_is_merged_computes_what_the_adapter_does(
    assets: Path, adapters: dict[str, Path], name: str
) -> None:
    base = assets / "qwen2"
    merged = build(base, adapters[name], finetuning_type="oft")
    assert type(merged).__name__ == "Qwen2ForCausalLM"
    expected = reference(base, adapters[name])
    assert (logits(merged) - expected).abs().max() < 1e-4
    assert (logits(load(base)) - expected).abs().max() > 1e-2
    said = [finding.message for finding in run.current().findings]
    if name == "series":
        assert len(said) == 1 and "its rotations are not orthogonal: ||RR'-I||/||I|| reaches 0.13" in said[0]
    else:
        assert said == []


@pytest.mark.parametrize("family", ["qwen25vl", "qwen3_5"])
def test_merging_in_a_vision_language_model(assets: Path, tmp_path: Path, family: str) -> None:
    """The text's layers by its logits, the tower's by their names."""
    torch.manual_seed(0)
    config = OFTConfig(oft_block_size=8, target_modules=[*TARGETS, "attn.qkv"], use_cayley_neumann=False)
    adapted = get_peft_model(load(assets / family), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "oft_R" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(tmp_path)
    merged = build(assets / family, tmp_path, finetuning_type="oft")
    assert (logits(merged) - logits(adapted)).abs().max() < 1e-4
    assert (logits(load(assets / family)) - logits(adapted)).abs().max() > 1e-3
    plain = dict(load(assets / family).named_parameters())
    changed = {n.split(".weight")[0] for n, p in merged.named_parameters() if not torch.equal(p, plain[n])}
    ends = {".".join(name.split(".")[-3:]) for name in changed}
    assert ends >= {"3.mlp.down_proj", "3.self_attn.q_proj", "0.attn.qkv", "1.attn.qkv"}


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_merging_into_half_precision_is_said_and_avoided_on_request(
    assets: Path, adapters: dict[str, Path], tmp_path: Path, asked: str
) -> None:
    """Stock rounds to bfloat16 while it merges, and exports that in float32 when asked to."""
    base = tmp_path / "base"
    load(assets / "qwen2").bfloat16().save_pretrained(base)
    for file in (assets / "qwen2").glob("*token*"):
        (base / file.name).write_bytes(file.read_bytes())
    model, finetuning = arguments(base, adapters["oft"], finetuning_type="oft")
    model.infer_dtype = asked
    merged = load_model(load_tokenizer(model)["tokenizer"], model, finetuning)
    exact = PeftModel.from_pretrained(load(base).float(), adapters["oft"])
    apart = (logits(merged.float()) - logits(exact)).abs().max()
    said = [finding.message for finding in run.current().findings]
    if asked == "float32":
        assert apart < 2e-6 and said == []
    else:
        assert apart > 5e-5
        assert f"{adapters['oft']} is merged into bfloat16 weights: each rotated weight is rounded" in said[0]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_wide_blocks_are_merged_rightly_on_a_cpu_with_several_threads(
    assets: Path, tmp_path: Path, two_threads: None
) -> None:
    """Of blocks of 160 torch's batched solver makes something else, or an error."""
    base = tmp_path / "base"
    plain = load(assets / "qwen2")
    shape = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "hidden_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 80,
    }
    for key, value in shape.items():
        setattr(plain.config, key, value)
    torch.manual_seed(0)
    plain = type(plain)(plain.config)
    plain.save_pretrained(base)
    for file in (assets / "qwen2").glob("*token*"):
        (base / file.name).write_bytes(file.read_bytes())
    config = OFTConfig(oft_block_size=160, target_modules=["q_proj", "v_proj"], use_cayley_neumann=False)
    adapted = get_peft_model(plain, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "oft_R" in name:
                parameter.normal_(0, 0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    torch.set_num_threads(1)
    expected = logits(adapted)
    torch.set_num_threads(2)

    rotation = adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").oft_R["default"]
    stock = OFTRotationModule._cayley_batch.__wrapped__
    try:
        wrong = stock(rotation, rotation.weight, 160, False)
    except RuntimeError:
        wrong = torch.full((2, 160, 160), torch.nan)
    assert not torch.allclose(wrong @ wrong.mT, torch.eye(160), atol=1e-3)

    for trainable in (False, True):  # merged, as `export` has it, and by the forward of the adapter
        found = build(base, tmp_path / "adapter", trainable=trainable, finetuning_type="oft")
        assert (logits(found) - expected).abs().max() < 1e-5
    assert (logits(load(base)) - expected).abs().max() > 1e-2


def test_training_goes_on_from_an_oft_adapter(assets: Path, adapters: dict[str, Path]) -> None:
    model = build(assets / "qwen2", adapters["oft"], trainable=True, finetuning_type="oft")
    saved = load_file(adapters["oft"] / "adapter_model.safetensors")
    live = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert live.keys() == saved.keys()
    assert all(torch.equal(live[name], saved[name]) for name in saved)


@pytest.mark.parametrize("old", ["lora", "oft", "lora,oft"])
def test_a_new_oft_adapter_on_merged_ones(assets: Path, adapters: dict[str, Path], old: str) -> None:
    base, paths = assets / "qwen2", [adapters[name] for name in old.split(",")]
    changes = {"finetuning_type": "oft", "lora_target": "v_proj", "create_new_adapter": True}
    model = build(base, ",".join(map(str, paths)), trainable=True, **changes)
    assert (logits(model) - reference(base, *paths)).abs().max() < 1e-4
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 4 and all("v_proj.oft_R.default" in name for name in trainable)


def test_a_lora_is_merged_and_the_last_oft_adapter_goes_on(assets: Path, adapters: dict[str, Path]) -> None:
    base, paths = assets / "qwen2", [adapters["lora"], adapters["oft"]]
    model = build(base, ",".join(map(str, paths)), trainable=True, finetuning_type="oft")
    assert (logits(model) - reference(base, *paths)).abs().max() < 1e-4
    assert model.active_peft_config.peft_type == "OFT"


def test_the_model_without_its_adapter_is_the_reference_of_dpo(assets: Path) -> None:
    model, finetuning = arguments(assets / "qwen2", None, finetuning_type="oft", stage="dpo")
    assert trainer_utils.create_ref_model.__wrapped__(model, finetuning) is not None  # a second model
    assert trainer_utils.create_ref_model(model, finetuning) is None
    policy = build(assets / "qwen2", None, trainable=True, finetuning_type="oft", lora_target="q_proj")
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    changed = logits(policy)
    with policy.disable_adapter():
        assert torch.equal(logits(policy), logits(load(assets / "qwen2")))
    assert not torch.equal(changed, logits(load(assets / "qwen2")))


def test_an_oft_reward_adapter_is_loaded_beside_the_trained_one(
    assets: Path, adapters: dict[str, Path]
) -> None:
    from llamafactory.train.ppo.ppo_utils import replace_model

    base = assets / "qwen2"
    changes = {"finetuning_type": "oft", "lora_target": ",".join(TARGETS)}
    policy = build(base, None, trainable=True, add_valuehead=True, **changes)
    model, finetuning = arguments(
        base,
        None,
        **changes,
        stage="ppo",
        reward_model=str(adapters["oft"]),
        reward_model_type="oft",
    )
    with pytest.raises(Exception, match="tokenizer"):  # stock looks for a whole model there
        trainer_utils.create_reward_model.__wrapped__(policy, model, finetuning)
    assert trainer_utils.create_reward_model(policy, model, finetuning) is None
    plain = logits(policy.pretrained_model)
    replace_model(policy, target="reward")
    assert (logits(policy.pretrained_model) - reference(base, adapters["oft"])).abs().max() < 1e-4
    head = load_file(adapters["oft"] / "value_head.safetensors")
    assert torch.equal(policy.v_head.summary.weight, head["v_head.summary.weight"])
    replace_model(policy, target="default")
    assert torch.equal(logits(policy.pretrained_model), plain)


@pytest.mark.parametrize("name", ["oft", "lora"])
def test_chat(assets: Path, adapters: dict[str, Path], name: str) -> None:
    from llamafactory.chat import ChatModel

    recipe = {
        "model_name_or_path": str(assets / "qwen2"),
        "adapter_name_or_path": str(adapters["oft"]),
        "template": "default",
        "finetuning_type": name,
        "infer_dtype": "float32",
    }
    chat = ChatModel(recipe)
    try:
        expected = reference(assets / "qwen2", adapters["oft"])
        model = chat.engine.model
        assert (logits(model.cpu()) - expected).abs().max() < 1e-4
    finally:
        chat._loop.call_soon_threadsafe(chat._loop.stop)
