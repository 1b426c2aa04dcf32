"""Batches of rows in tokens, cut and packed as the host's processors cut and pack them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llamafactory_ascend.checks.data import lengths
from llamafactory_ascend.checks.data.catalogue import Entry
from llamafactory_ascend.checks.lengths.totals import Labels, Share, Totals
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host import argument_types, arguments
from llamafactory_ascend.host.data import Encoder, Ids, TokenCounter, encode
from llamafactory_ascend.host.quick_tokenizer import QuickTokenizer

Item = tuple[int, int, Mapping[str, Any]]  # number of the data set, number of the row, row
MEDIA = ("image", "video", "audio")


def load(recipe: Mapping[str, Any], stage: str) -> Encoder:
    """Load tokenizer, processor and template as a training with this recipe would; no device, no weights.

    Args:
        recipe: the host's keys; those of its training and finetuning arguments are passed over.

    Raises:
        AscendError: the host refuses one of them, or cannot load the tokenizer.
    """
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from llamafactory.model.loader import load_tokenizer
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    classes = (ModelArguments, DataArguments, Seq2SeqTrainingArguments)
    argument_types.refuse(classes, recipe, "the recipe")
    arguments.refuse_broken_model(recipe.get("model_name_or_path"))
    parser = HfArgumentParser([ModelArguments, DataArguments])
    try:
        model_args, data_args = parser.parse_dict(dict(recipe), allow_extra_keys=True)
        model_args.model_max_length = data_args.cutoff_len
        if data_args.packing is None:
            data_args.packing = stage == "pt"
        loaded = load_tokenizer(model_args)
        template = get_template_and_fix_tokenizer(loaded["tokenizer"], data_args)
    except (OSError, ValueError, TypeError) as error:
        model, name = recipe.get("model_name_or_path"), recipe.get("template")
        cause = " ".join(str(error.__cause__ or error).split())
        raise AscendError(f"model {model} with template {name}: {cause}") from None
    return Encoder(data_args, template, QuickTokenizer(loaded["tokenizer"]), loaded["processor"])


class RowCounter:
    """``counter(totals, place, number, aligned)``: a row that the host has converted, added to totals."""

    def __init__(self, encoder: Encoder, stage: str) -> None:
        from llamafactory.data.processor.processor_utils import infer_seqlen

        self.encoder, self.stage, self.cut = encoder, stage, infer_seqlen
        args = encoder.data_args
        chats = stage == "sft"  # elsewhere a question and its answer are one pair
        self.labels = Labels(
            args.train_on_prompt and chats,
            encoder.template.efficient_eos and chats,
            args.mask_history and chats,
        )
        self.media = _media_tokens(encoder)

    def __call__(self, totals: Totals, place: str, number: int, aligned: dict[str, Any]) -> int | None:
        """Add a row; return its length as it is packed, None where the host leaves it out."""
        if not keeps(aligned, self.stage):
            totals.drop(f"{place}: its turns are no pairs of question and answer")
            return None
        encoded, beside = encode(aligned, self.encoder, self.stage)
        args = self.encoder.data_args
        if self.stage == "pt":
            return self._see_text(totals, place, len(encoded[0][0]))
        pairs = [(len(source), len(target)) for source, target in encoded]
        row = lengths.count(number, pairs, len(beside), args.cutoff_len, self.cut, self.labels.last_only)
        totals.see(row, args.cutoff_len, self.labels, place)
        if any(aligned[f"_{name}s"] for name in MEDIA):
            whole = [part for pair in encoded for part in pair]
            left = [length for turn in row.turns for length in (turn.prompt_kept, turn.response_kept)]
            self._see_media(totals, whole, left, beside)
        return row.kept

    def _see_text(self, totals: Totals, place: str, tokens: int) -> int:
        args = self.encoder.data_args
        if args.packing:
            totals.see_text(tokens, tokens, place)
            return tokens
        tokens += bool(getattr(self.encoder.tokenizer, "add_bos_token", False))
        totals.see_text(tokens, min(tokens, args.cutoff_len), place)
        return tokens

    def _see_media(self, totals: Totals, whole: list[Ids], left: list[int], beside: Ids) -> None:
        for name, token in self.media.items():
            before = beside.count(token)
            total = before + sum(ids.count(token) for ids in whole)
            if total:
                kept = before + sum(
                    ids[:length].count(token) for ids, length in zip(whole, left, strict=True)
                )
                totals.media.setdefault(name, Share()).add(total, kept)


class BatchCounter:
    """``counter(items)``: the totals of a batch, of as many rows as the host's processor is given at once."""

    def __init__(self, entries: Sequence[Entry], encoder: Encoder, stage: str) -> None:
        self.names = [entry.name for entry in entries]
        self.rows = [TokenCounter(entry, encoder, stage) for entry in entries]
        self.encoder, self.stage, self.see = encoder, stage, RowCounter(encoder, stage)

    def __call__(self, items: Iterable[Item]) -> Totals:
        totals, kept = Totals(), []
        for of, number, row in items:
            place = f"{self.names[of]} row {number}"
            try:
                aligned = self.rows[of].convert({**dict.fromkeys(self.rows[of].columns), **row})
                length = self.see(totals, place, number, aligned)
            except Exception as error:  # a training would die of it; here it is counted and named
                cause = " ".join(str(error).split())[:200]
                totals.drop(f"{place}: {type(error).__name__}: {cause}", failed=True)
            else:
                kept += [length] if length is not None else []
        if self.encoder.data_args.packing:
            self._pack(totals, kept)
        return totals

    def _pack(self, totals: Totals, kept: list[int]) -> None:
        from llamafactory.data.processor.processor_utils import greedy_knapsack

        room = self.encoder.data_args.cutoff_len
        if self.stage == "pt":
            totals.blocks = sum(kept) // room
            totals.packed = totals.blocks * room
        elif self.stage == "sft":
            fitting = [length for length in kept if length <= room]
            totals.packed = sum(fitting)
            totals.blocks = len(greedy_knapsack(fitting, room))  # empties the list
        totals.tail = sum(kept) - totals.packed


def keeps(aligned: Mapping[str, Any], stage: str) -> bool:
    """Say whether the host's processor of this stage keeps a converted row."""
    prompt, response = aligned["_prompt"], aligned["_response"]
    if stage == "pt":
        return True
    enough = len(response) >= 2 if stage in ("rm", "dpo", "kto") else len(response) == 1
    return len(prompt) % 2 == 1 and enough


def _media_tokens(encoder: Encoder) -> dict[str, int]:
    plugin = encoder.template.mm_plugin
    tokens = {name: getattr(plugin, f"{name}_token", None) for name in MEDIA}
    return {name: encoder.tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items() if token}
