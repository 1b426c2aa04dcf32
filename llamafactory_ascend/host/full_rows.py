"""Batches of rows as long as `cutoff_len` lets them be, through the host's own processor and collator."""

from dataclasses import replace
from typing import Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.run import Arguments

PARTS = 4  # samples that share a packed row


class FullRows:
    """Makes batches of full rows.

    Attributes:
        images: pictures in each row, as large as the recipe lets them be.
    """

    def __init__(self, arguments: Arguments, images: int) -> None:
        from llamafactory.data.template import get_template_and_fix_tokenizer
        from llamafactory.model.loader import load_tokenizer

        self.arguments, self.images = arguments, images
        loaded = load_tokenizer(arguments.model)
        self.tokenizer, self.processor = loaded["tokenizer"], loaded["processor"]
        self.template = get_template_and_fix_tokenizer(self.tokenizer, arguments.data)

    def batch(self, model: Any, rows: int, tokens: int) -> dict[str, Any]:
        """Return what the host's collator makes of `rows` rows, on the CPU.

        Args:
            tokens: `cutoff_len`.

        Raises:
            AscendError: a row cannot be made, because its pictures need more than `cutoff_len` tokens.
        """
        from llamafactory.data.loader import _get_dataset_processor

        stage = self.arguments.finetuning.stage
        data = replace(self.arguments.data, cutoff_len=tokens)
        make = _get_dataset_processor(data, stage, self.template, self.tokenizer, self.processor)
        parts = PARTS if data.packing and stage == "sft" else 1
        examples = [self._example(tokens, parts) for _ in range(parts * rows)]
        columns = make.preprocess_dataset({key: [x[key] for x in examples] for key in examples[0]})
        features = [{key: values[row] for key, values in columns.items()} for row in range(rows)]
        try:
            return dict(self._collator(model)(features))
        except ValueError as error:
            raise AscendError(f"a row of {tokens} tokens cannot be made: {error}") from None

    def _example(self, tokens: int, parts: int) -> dict[str, Any]:
        """Return a conversation that fills a row, or its part of one, as the host's converters give them."""
        from PIL import Image

        words = tokens if parts == 1 else max(1, tokens // parts - self._beside())
        model = self.arguments.model
        side = int(model.image_max_pixels**0.5)
        pictures = [Image.new("RGB", (side, side)) for _ in range(self.images)]
        return {
            "_prompt": [{"role": "user", "content": "<image>" * self.images + "1"}],
            "_response": [{"role": "assistant", "content": self._text(words)}],
            "_system": "",
            "_tools": "",
            "_images": pictures or None,
            "_videos": None,
            "_audios": None,
        }

    def _text(self, tokens: int) -> str:
        """Return a text of so many tokens."""
        ids = self.tokenizer("1", add_special_tokens=False)["input_ids"]
        return str(self.tokenizer.decode(ids[-1:] * tokens))

    def _beside(self) -> int:
        """Return the tokens of a conversation beside its answer; pictures are not looked at."""
        messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]
        prompt, answer = self.template.encode_oneturn(self.tokenizer, messages, "", "")
        return len(prompt) + len(answer)

    def _collator(self, model: Any) -> Any:
        from llamafactory.data import SFTDataCollatorWith4DAttentionMask
        from llamafactory.extras.constants import IGNORE_INDEX
        from transformers import DataCollatorForLanguageModeling

        if self.arguments.finetuning.stage == "pt":
            return DataCollatorForLanguageModeling(tokenizer=self.tokenizer, mlm=False)
        data, chosen = self.arguments.data, self.arguments.model
        return SFTDataCollatorWith4DAttentionMask(
            template=self.template,
            model=model,
            pad_to_multiple_of=8,
            label_pad_token_id=IGNORE_INDEX
            if data.ignore_pad_token_for_loss
            else self.tokenizer.pad_token_id,
            block_diag_attn=chosen.block_diag_attn,
            neat_packing=data.neat_packing,
            attn_implementation=getattr(model.config, "_attn_implementation", None),
            compute_dtype=chosen.compute_dtype,
            tokenizer=self.tokenizer,
            processor=self.processor,
        )
