"""A tiny Qwen3.5 hybrid with random weights and a Chinese tokenizer of its own, for the demo.

It has the structure of the real thing - gated DeltaNet layers with every fourth layer full attention,
and a vision tower - at a size that trains on two CPU cores. It knows no language: what the demo shows
is memory, operators and losses, never the quality of an answer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

CORPUS = Path(__file__).parent.parent / "dataset_info" / "vertical_demo.json"
VOCABULARY = 2048
SEED = 0

# the order gives the ids 0 to 11
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_model(dest: Path) -> None:
    """Write model, tokenizer and processor to the folder `dest`; the same files on every call.

    The folder appears whole or not at all, and the random state of the process is not disturbed.

    Raises:
        FileExistsError: `dest` exists and is not empty; nothing is touched.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise FileExistsError(f"{dest} exists and is not empty; name a new folder for the demo model.")
    dest.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as scratch:
        built = Path(scratch) / dest.name
        make_model().save_pretrained(built)
        # the processor saves its tokenizer too
        make_processor(tokenizer).save_pretrained(built)
        built.replace(dest)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens, trained on the demo rows: about one token for a word."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    rows = json.loads(CORPUS.read_text(encoding="utf-8"))
    texts = [row[column] for row in rows for column in ("instruction", "input", "output")]
    bpe.train_from_iterator([*texts, "system user assistant"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:8],
        chat_template=CHAT_TEMPLATE,
    )


def make_model() -> Qwen3_5ForConditionalGeneration:
    """8 text layers (6 DeltaNet, 2 attention) of width 128 and 2 vision blocks, in bfloat16."""
    config = Qwen3_5Config(
        text_config={
            "vocab_size": VOCABULARY,
            "bos_token_id": None,
            "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
            "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 8,
            "full_attention_interval": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "num_position_embeddings": 64,
        },
        image_token_id=SPECIAL_TOKENS.index("<|image_pad|>"),
        video_token_id=SPECIAL_TOKENS.index("<|video_pad|>"),
        vision_start_token_id=SPECIAL_TOKENS.index("<|vision_start|>"),
        vision_end_token_id=SPECIAL_TOKENS.index("<|vision_end|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Qwen3_5ForConditionalGeneration(config).bfloat16()


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """Images become 1 to 16 tokens of 28 x 28 pixels each."""
    pixels = 28 * 28
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=14, min_pixels=pixels, max_pixels=16 * pixels),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=14),
    )
