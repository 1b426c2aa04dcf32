"""The host's data sets: where its names come from, whose media belong where, and rows as its tokens."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.checks.data import lengths
from llamafactory_ascend.checks.data.catalogue import Entry
from llamafactory_ascend.checks.data.lengths import RowTokens
from llamafactory_ascend.features import data_checks
from llamafactory_ascend.host.arguments import refuse_broken_model
from llamafactory_ascend.patching import Patch, Target

Ids = list[int]
MEDIA = "ascend_media_dir"  # an attribute that a fragment's DatasetAttr has beside the host's own


def get_dataset_list(original: Callable[..., Any], dataset_names: list[str] | None, dataset_dir: Any) -> Any:
    """Look names up in the user's dataset_info.json, read as UTF-8, and in the fragments over it.

    Raises:
        AscendError: a name that no file has, or that two have; a file that cannot be read.
    """
    if not dataset_names or not data_checks.is_folder(dataset_dir):
        return original(dataset_names, dataset_dir)
    found = data_checks.catalogue(Path(dataset_dir), run.current().settings.dataset_info)
    entries = [found.find(name) for name in dataset_names]
    attributes = original(dataset_names, {entry.name: entry.as_host_reads() for entry in entries})
    for entry, attribute in zip(entries, attributes, strict=True):
        _place_media(entry, attribute)
    return attributes


def _place_media(entry: Entry, attribute: Any) -> None:
    if entry.source.origin != "yours":
        setattr(attribute, MEDIA, str(entry.folder))


def get_dataset_converter(original: Callable[..., Any], name: str, dataset_attr: Any, data_args: Any) -> Any:
    """Give a fragment's rows the fragment's own folder to look for media in."""
    folder = getattr(dataset_attr, MEDIA, None)
    if folder is not None:
        data_args = copy.copy(data_args)
        data_args.media_dir = folder
    return original(name, dataset_attr, data_args)


@dataclass(frozen=True)
class Encoder:
    """What turns a row into tokens as a training would: the host's arguments, template and tokenizer."""

    data_args: Any
    template: Any
    tokenizer: Any
    processor: Any


def load_encoder(
    model: str, template: str | None, cutoff_len: int, mask_history: bool, media_dir: Path
) -> Encoder:
    """Load the tokenizer and the template of a model; its weights are not touched.

    Raises:
        AscendError: a file of the model cannot be read, or there is no tokenizer.
    """
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from llamafactory.model.loader import load_tokenizer

    refuse_broken_model(model)
    loaded = load_tokenizer(ModelArguments(model_name_or_path=model))
    data_args = DataArguments(
        template=template,
        cutoff_len=cutoff_len,
        mask_history=mask_history,
        dataset_dir=str(media_dir),
    )
    made = get_template_and_fix_tokenizer(loaded["tokenizer"], data_args)
    return Encoder(data_args, made, loaded["tokenizer"], loaded["processor"])


class TokenCounter:
    """``counter(number, row)``: a row of a data set in tokens, as a training would see it.

    Conversion, template and the division of the room that is left are the host's own functions. Rows must be
    ones that the host keeps.
    """

    def __init__(self, entry: Entry, encoder: Encoder, stage: str = "sft") -> None:
        from llamafactory.data import converter, parser
        from llamafactory.data.processor.processor_utils import infer_seqlen

        attribute = parser.get_dataset_list([entry.name], {entry.name: entry.as_host_reads()})[0]
        _place_media(entry, attribute)
        self.convert = get_dataset_converter(
            converter.get_dataset_converter, attribute.formatting, attribute, encoder.data_args
        )
        self.columns = _columns(attribute)
        self.encoder, self.stage, self.cut = encoder, stage, infer_seqlen

    def __call__(self, number: int, row: Mapping[str, Any]) -> RowTokens:
        """Return prompt and response of every turn, what `cutoff_len` keeps of them and what is lost."""
        pairs, overhead = _lengths(
            self.convert({**dict.fromkeys(self.columns), **row}), self.encoder, self.stage
        )
        data_args = self.encoder.data_args
        last_only = self.stage == "sft" and data_args.mask_history
        return lengths.count(number, pairs, overhead, data_args.cutoff_len, self.cut, last_only)


def token_counts(
    rows: Iterable[tuple[int, Mapping[str, Any]]], entry: Entry, encoder: Encoder, stage: str = "sft"
) -> Iterator[RowTokens]:
    """Yield (number, row) pairs in tokens; see TokenCounter."""
    counter = TokenCounter(entry, encoder, stage)
    return (counter(number, row) for number, row in rows)


def _columns(attribute: Any) -> list[str]:
    """Return the keys that the host looks up in a row: a table has them all, a line of JSON may not."""
    from llamafactory_ascend.checks.data.schema import COLUMNS

    return [key for key in (getattr(attribute, name) for name in COLUMNS) if key]


def encode(aligned: dict[str, Any], encoder: Encoder, stage: str) -> tuple[list[tuple[Ids, Ids]], Ids]:
    """Return the tokens of the turns of a converted row, prompt and answer of each, and those beside them.

    Of several answers to one question (rm, dpo) the longest is returned.
    """
    template, tokenizer = encoder.template, encoder.tokenizer
    prompt, response = aligned["_prompt"], aligned["_response"]
    if stage == "pt":
        end = "<|end_of_text|>" if encoder.data_args.template == "llama3" else tokenizer.eos_token
        return [(tokenizer(prompt[0]["content"] + end, add_special_tokens=False)["input_ids"], [])], []
    media = [aligned[f"_{name}"] or [] for name in ("images", "videos", "audios")]
    end_token = [tokenizer.eos_token_id] if template.efficient_eos else []

    def messages(answer: list[dict[str, str]]) -> Any:
        return template.mm_plugin.process_messages(prompt + answer, *media, encoder.processor)

    before, _ = template.mm_plugin.process_token_ids([], [], *media, tokenizer, encoder.processor)
    if stage == "sft":
        drops_thoughts = encoder.data_args.mask_history and not template.preserve_thinking
        encoded = template.encode_multiturn(
            tokenizer, messages(response), aligned["_system"], aligned["_tools"], drops_thoughts
        )
        return encoded, before + end_token
    answers = [one for one in response if one["content"]] or response[:1] if stage == "kto" else response
    encoded = [
        template.encode_oneturn(tokenizer, messages([answer]), aligned["_system"], aligned["_tools"])
        for answer in answers
    ]
    return [(before + encoded[0][0], max((one[1] for one in encoded), key=len) + end_token)], []


def _lengths(aligned: dict[str, Any], encoder: Encoder, stage: str) -> tuple[list[tuple[int, int]], int]:
    """Return (prompt, answer) lengths of the turns of a converted row, and the tokens beside them."""
    encoded, beside = encode(aligned, encoder, stage)
    return [(len(source), len(target)) for source, target in encoded], len(beside)


PATCHES = [
    Patch(
        id="data.names",
        targets=(Target("llamafactory.data.parser", "get_dataset_list"),),
        around=get_dataset_list,
        parameters=("dataset_names", "dataset_dir"),
        why=(
            "Data sets come from one dataset_info.json, opened without an encoding; an unknown name gets no "
            "suggestion, and nothing can add a data set but editing that file."
        ),
        remove_when="the host reads it as UTF-8 and merges several files",
        tested={"bcba272caa1d": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
        feature="dataset_info",
    ),
    Patch(
        id="data.media",
        targets=(Target("llamafactory.data.converter", "get_dataset_converter"),),
        around=get_dataset_converter,
        parameters=("name", "dataset_attr", "data_args"),
        why="All data sets of a run share one `media_dir`; media of a fragment lie beside the fragment.",
        remove_when="patch data.names goes",
        tested={"b3e9eba2f886": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
        feature="dataset_info",
    ),
]
