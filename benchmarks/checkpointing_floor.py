"""The floor of the checkpointing benchmark: what no run that recomputes layer by layer can do without.

    python -m benchmarks.checkpointing_floor MODEL_FOLDER

Two moments need the most memory, and the floor is the larger of them:

* the loss: the weights, the input of every checkpointed layer, the logits and what the loss keeps of them;
* the backward of one layer: the weights, the inputs of the checkpointed layers up to it, and that layer's own
  forward and backward, measured alone on the simulated NPU.

Counted in are the weights (base as saved, adapters in float32 as the host trains them), the inputs of the 13
layers from the first adapter on (layers 3 to 15, in the dtype of the weights), float32 logits with the
float32 log-probabilities that cross entropy saves, and the peak of a single layer: all it saves, its
temporaries, and the gradients of its input, output and adapters. Left out, so that the floor errs on the low
side, are the optimizer's state, gradients of other layers, the batch, position embeddings and the masks.
Nothing of the plugin runs here. Prints one line of JSON, in bytes.
"""

import json
import sys
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

from benchmarks.text_case import CUTOFF, RANK, TARGETS

DEVICE = "npu"
FLOAT32 = 4


def measure_layer(config: Any, index: int) -> int:
    """Return the bytes that a decoder layer adds at its peak, forward to backward, to weights and input."""
    torch.manual_seed(0)
    layer = nn.ModuleDict({"layer": Qwen3_5DecoderLayer(config, index)}).bfloat16().requires_grad_(False)
    if config.layer_types[index] == "full_attention":
        inject_adapter_in_model(LoraConfig(r=RANK, target_modules=TARGETS), layer)
        for parameter in layer.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    module = layer.to(DEVICE).train()["layer"]
    hidden = torch.randn(
        1, CUTOFF, config.hidden_size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True
    )
    positions = torch.arange(CUTOFF, device=DEVICE)[None]
    embeddings = Qwen3_5TextRotaryEmbedding(config).to(DEVICE)(hidden.detach(), positions)
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_stats()["requested_bytes.all.current"]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        output = module(hidden, position_embeddings=embeddings)
    output.backward(torch.ones_like(output))
    peak: int = torch.npu.memory_stats()["requested_bytes.all.peak"]
    return peak - before


def main(model_folder: str) -> None:
    config = AutoConfig.from_pretrained(model_folder).text_config
    config._attn_implementation = "sdpa"
    kinds = config.layer_types
    alone = {kind: measure_layer(config, kinds.index(kind)) for kind in dict.fromkeys(kinds)}

    model = AutoModelForImageTextToText.from_pretrained(model_folder)
    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=TARGETS), model.requires_grad_(False))
    weights = sum(p.numel() * (FLOAT32 if p.requires_grad else p.element_size()) for p in model.parameters())

    first = kinds.index("full_attention")  # the first layer with an adapter
    layer_input = CUTOFF * config.hidden_size * torch.bfloat16.itemsize
    logits = CUTOFF * config.vocab_size * FLOAT32
    loss = (len(kinds) - first) * layer_input + 2 * logits
    layers = [(index - first + 1) * layer_input + alone[kinds[index]] for index in range(first, len(kinds))]
    parts = {
        "weights": weights,
        "checkpointed_layers": len(kinds) - first,
        "layer_inputs": (len(kinds) - first) * layer_input,
        "logits_and_loss": 2 * logits,
        "layers_alone": alone,
    }
    print(json.dumps({"floor": weights + max(loss, *layers), **parts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
