"""Components and blocks: the table fits the models of Transformers, and what is not in it is found."""

from collections import Counter

import pytest
import torch
from torch import nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.layers import component_of
from llamafactory_ascend.features.targets.inventory import Inventory, plain_modules
from llamafactory_ascend.features.targets.layouts import LAYOUTS, discover
from llamafactory_ascend.features.targets.selection import select
from tests.features.targets.families import FAMILIES, build, wish

DEPTH = {"qwen3_5_text": (8, 0)}  # text and vision blocks, where not 4 and 2


def test_every_family_of_the_table_has_a_model_here() -> None:
    assert set(FAMILIES) == set(LAYOUTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_fits(name: str) -> None:
    """Its paths exist, and every linear layer is in the component that checkpointing counts it in."""
    model = build(name)
    found = Inventory.of(model)
    assert model.config.model_type == name
    assert found.layout is LAYOUTS[name]
    owners = {path: found.layout.component_of(path) for path in found.linears}
    assert owners == {path: component_of(path) for path in found.linears}
    tower = "vision" in found.layout.roots
    assert set(owners.values()) == ({"text", "projector", "vision"} if tower else {"text"})
    counts = [
        len(list(model.get_submodule(found.layout.blocks[component]).children()))
        for component in ("text", "vision")
        if component in found.layout.blocks
    ]
    assert counts == list(DEPTH.get(name, (4, 2)))[: len(counts)]


@pytest.mark.parametrize("name", FAMILIES)
def test_discovery_finds_what_the_table_says(name: str) -> None:
    model = build(name)
    modules = plain_modules(model)
    found = discover(modules)
    assert dict(found.blocks) == dict(LAYOUTS[name].blocks)
    linears = Inventory.of(model).linears
    assert [found.component_of(path) for path in linears] == [
        LAYOUTS[name].component_of(path) for path in linears
    ]


def test_a_model_that_is_in_no_table() -> None:
    """CLIP's attention has the names of Llama's."""
    group = {"modules": ["q_proj", "v_proj"], "blocks": "last:2"}
    found = select(build("llava"), wish(text=group, vision=group))
    assert Counter(path.rpartition(".self_attn")[0] for path in found.names) == {
        "model.vision_tower.encoder.layers.3": 2,
        "model.vision_tower.encoder.layers.4": 2,
        "model.language_model.layers.1": 2,
        "model.language_model.layers.2": 2,
    }


def test_an_audio_tower_counts_as_vision() -> None:
    found = select(build("qwen2_audio"), wish(vision={"modules": "k_proj", "blocks": 1}))
    assert found.names == ("audio_tower.layers.1.self_attn.k_proj",)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.audio_tower, self.model = (
            nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(2, 2)}) for _ in range(2))})
            for _ in range(3)
        )


def test_two_towers_have_no_numbered_blocks() -> None:
    everywhere = select(TwoTowers(), wish(vision={"modules": "fc"}))
    assert len(everywhere.names) == 4
    with pytest.raises(AscendError, match="the vision has no numbered blocks in this model"):
        select(TwoTowers(), wish(vision={"modules": "fc", "blocks": 0}))
    assert len(select(TwoTowers(), wish(text={"modules": "all", "blocks": 0})).names) == 1


def test_a_tower_without_a_known_name_is_refused() -> None:
    """Taken for text, it would be adapted by accident."""
    model = build("llava")
    model.model.vpm = model.model.vision_tower
    del model.model.vision_tower
    with pytest.raises(AscendError, match="the config of llava has `vision_config`, but no module"):
        select(model, wish(text={"modules": "q_proj"}))


def test_a_moved_model_is_found_again() -> None:
    """A known `model_type` whose paths are others, as older versions of Transformers had them."""

    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            new = build("qwen2_5_vl")
            self.config = new.config
            self.visual, self.model = new.model.visual, new.model.language_model

    with torch.device("meta"):
        found = select(
            Old(), wish(vision={"modules": "attn.qkv", "blocks": "last:1"}, text={"modules": "q_proj"})
        )
    assert found.names[0] == "visual.blocks.1.attn.qkv"
    assert found.names[1:] == tuple(f"model.layers.{index}.self_attn.q_proj" for index in range(4))
