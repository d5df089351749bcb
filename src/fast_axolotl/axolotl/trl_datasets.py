"""TRL's trainers prepare their datasets a table at a time: the steps are theirs, the rows are ours.

``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer`` prepare a dataset in up to six
passes of ``map`` and ``filter`` over rows: extract the prompt, add the end token, tokenise (up to
three tokenizer calls a row), build labels, truncate, drop. ``_prepare_dataset`` of TRL still runs
here, whole, with its conditions, its errors and its warnings. It is given a dataset that knows the
row functions which that method defines, and answers each with a function of ours that takes 1,000
rows as an Arrow table: texts of a batch go to the Rust tokenizer together (see ``tokenizers``),
conversations are rendered from plans (see ``templates``), the rest are a few operations on columns.

Passes, progress bars, processes and cache files stay what they are: ours calls the same ``map``
with the fingerprint that stock's arguments have, so either finds what the other has cached. Types
are those that ``datasets`` infers for lists of integers: int32 for ``input_ids``, else int64.

A pass that is unfamiliar is TRL's own, from its first row: datasets that are streamed, formatted or
hold images, tokenizers with methods of their own, processors, columns of texts beside columns of
conversations (TRL looks at an arbitrary one of them), nulls, and batches without any token, whose
type is not known. Costs the tokenizer's own time and some 30 µs a row.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from fast_axolotl.axolotl.data import list_lengths, require_integers, require_no_decoding
from fast_axolotl.axolotl.filters import stock_fingerprint
from fast_axolotl.axolotl.patching import Final, Unfamiliar, tally
from fast_axolotl.axolotl.templates import Renderer, find_renderer
from fast_axolotl.axolotl.tokenizers import (
    check_tokenizer,
    encode_texts,
    set_truncation,
    too_long,
)

__all__ = ["prepare_dpo", "prepare_kto", "prepare_reward", "prepare_sft"]

_BATCH_ROWS = 1000
"""Rows of a table; as many as stock's ``map`` writes at once."""

_IGNORED = -100
_CONVERSATIONAL = ("prompt", "chosen", "rejected", "completion", "messages")
"""Columns by which TRL tells conversations from texts."""

_MISMATCH = (
    "Mismatch between tokenized prompt and the start of tokenized prompt+{}. "
    "This may be due to unexpected tokenizer behavior, whitespace issues, or special "
    "token handling. Verify that the tokenizer is processing text consistently."
)

Options = Mapping[str, Any]
Columns = dict[str, pa.Array]
Change = Callable[[pa.Table, Callable[..., Any], Options], Columns]
"""What a row function does, for a table: columns that are new or other than before."""


def prepare_sft(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``SFTTrainer._prepare_dataset``."""
    from trl.trainer.sft_trainer import SFTTrainer

    return _prepare("trl-sft", SFTTrainer, self, *args, **kwargs)


def prepare_dpo(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``DPOTrainer._prepare_dataset``."""
    from trl.trainer.dpo_trainer import DPOTrainer

    return _prepare("trl-dpo", DPOTrainer, self, *args, **kwargs)


def prepare_kto(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``KTOTrainer._prepare_dataset``."""
    from trl.trainer.kto_trainer import KTOTrainer

    return _prepare("trl-kto", KTOTrainer, self, *args, **kwargs)


def prepare_reward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``RewardTrainer._prepare_dataset``."""
    from trl.trainer.reward_trainer import RewardTrainer

    return _prepare("trl-reward", RewardTrainer, self, *args, **kwargs)


def _prepare(switch: str, trainer: Any, self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """TRL's own method on a dataset that answers some of its passes with ours."""
    if type(dataset) is not Dataset:
        raise Unfamiliar("the dataset is streamed, or of another kind")
    prepare = inspect.unwrap(vars(trainer)["_prepare_dataset"])
    try:
        result = prepare(self, _Watched.of(dataset, switch), *args, **kwargs)
    except Exception as error:
        # Each pass has been stock's by now where it could not be ours: the error is TRL's.
        raise Final(error) from error
    return _Watched.plain(result) if type(result) is _Watched else result


class _Watched(Dataset):  # type: ignore[misc]
    """A dataset that knows TRL's row functions; never seen outside of TRL's method."""

    @classmethod
    def of(cls, dataset: Any, switch: str) -> Any:
        watched = copy.copy(dataset)
        watched.__class__ = cls
        watched.switch = switch
        return watched

    def plain(self) -> Any:
        """The same rows as a dataset of the usual kind."""
        dataset = copy.copy(self)
        dataset.__class__ = Dataset
        del dataset.switch
        return dataset

    def map(self, function: Any = None, *args: Any, **options: Any) -> Any:
        return self._pass("map", _map, function, *args, **options)

    def filter(self, function: Any = None, *args: Any, **options: Any) -> Any:
        return self._pass("filter", _filter, function, *args, **options)

    def _pass(self, name: str, ours: Any, function: Any, *args: Any, **options: Any) -> Any:
        dataset, switch = self.plain(), self.switch
        change = _CHANGES.get(getattr(function, "__qualname__", ""))
        result = None
        if change is not None:
            try:
                result = ours(dataset, function, change, *args, **options)
            except Exception as error:  # noqa: BLE001  whatever it was, TRL's own pass decides
                reason = (
                    error if isinstance(error, Unfamiliar) else f"{type(error).__name__}: {error}"
                )
                tally(switch, f"{function.__name__}: {reason}", len(dataset))
        if result is None:
            result = getattr(dataset, name)(function, *args, **options)
        return _Watched.of(result, switch)


def _map(
    dataset: Any,
    function: Callable[..., Any],
    change: Change,
    *,
    num_proc: int | None = None,
    desc: str | None = None,
    fn_kwargs: Options | None = None,
    remove_columns: str | Sequence[str] | None = None,
    batched: bool = False,
    batch_size: int | None = None,
) -> Any:
    """What ``dataset.map(function, ...)`` gives, where ``change`` is the same for a table."""
    source = _as_arrow(dataset)
    given = {} if fn_kwargs is None else dict(fn_kwargs)
    removed = [remove_columns] if isinstance(remove_columns, str) else remove_columns
    hashed: dict[str, Any] = {"fn_kwargs": given}
    if removed is not None:
        hashed["remove_columns"] = removed
    rows = _BATCH_ROWS
    if batch_size is not None:
        # Stock's batches must not be cut.
        rows = batch_size * -(-_BATCH_ROWS // batch_size)
        if batch_size != _BATCH_ROWS:
            hashed["batch_size"] = batch_size
    transform = "datasets.arrow_dataset.Dataset._map_single"
    fingerprint = stock_fingerprint(dataset, transform, function, batched, hashed)
    options = {**given, "batch_size": batch_size}
    result = source.map(
        partial(_changed, change=change, function=function, options=options, removed=removed or ()),
        batched=True,
        batch_size=rows,
        writer_batch_size=rows,
        num_proc=num_proc,
        desc=desc,
        new_fingerprint=fingerprint,
    )
    return _as_python(result, fingerprint)


def _filter(
    dataset: Any,
    function: Callable[..., Any],
    change: Change,
    *,
    num_proc: int | None = None,
    desc: str | None = None,
) -> Any:
    """What ``dataset.filter(function, ...)`` gives, where ``change`` has the verdicts."""
    source = _as_arrow(dataset)
    hashed = {} if num_proc is None else {"num_proc": num_proc}
    transform = "datasets.arrow_dataset.Dataset.filter@2.0.1"
    fingerprint = stock_fingerprint(dataset, transform, function, False, hashed)

    def keeps(table: pa.Table) -> Any:
        return change(table.combine_chunks(), function, {})["keeps"]

    result = source.filter(
        keeps, batched=True, num_proc=num_proc, desc=desc, new_fingerprint=fingerprint
    )
    return _as_python(result, fingerprint)


def _as_arrow(dataset: Any) -> Any:
    """The dataset, with its rows as tables."""
    if not len(dataset) or dataset.list_indexes():
        raise Unfamiliar("the dataset is empty or indexed")
    if dataset._format_type is not None or dataset._format_kwargs or dataset._output_all_columns:
        raise Unfamiliar("the dataset has a format")
    require_no_decoding(dataset)
    source = copy.copy(dataset)
    source._format_type = "arrow"
    return source


def _as_python(dataset: Any, fingerprint: str) -> Any:
    dataset._format_type = None
    dataset._fingerprint = fingerprint
    return dataset


def _changed(
    table: pa.Table,
    *,
    change: Change,
    function: Callable[..., Any],
    options: Options,
    removed: Sequence[str],
) -> pa.Table:
    """A batch for ``map``: what it was, without the columns to remove, with those that changed."""
    table = table.combine_chunks()
    columns = change(table, function, options)
    table = table.drop_columns([name for name in removed if name not in columns])
    for name, array in columns.items():
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(place, table.schema.field(place), array)
        else:
            table = table.append_column(name, array)
    return table


def _extract_prompt(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    """``extract_prompt``: what both answers begin with, and what is left of them."""
    chosen, rejected = _column(table, "chosen"), _column(table, "rejected")
    kind = chosen.type
    is_text = pa.types.is_string(kind)
    # The types of prompts are found from their values: nulls, or others than texts, may change it.
    has_texts = is_text or (
        _is_chat(kind)
        and all(pa.types.is_string(field.type) for field in kind.value_type)
        and not any(
            part.null_count for side in (chosen, rejected) for part in side.flatten().flatten()
        )
    )
    if kind != rejected.type or not has_texts or "prompt" in table.column_names:
        raise Unfamiliar(f"prompts are extracted from {kind}")
    prompts: list[Any] = []
    rest: tuple[list[Any], list[Any]] = [], []
    for pair in zip(chosen.to_pylist(), rejected.to_pylist(), strict=True):
        end = (
            _common(*pair)
            if is_text
            else next(
                (
                    place
                    for place, (one, other) in enumerate(zip(*pair, strict=False))
                    if one != other
                ),
                None,
            )
        )
        if end is None:
            end = min(map(len, pair)) - 1
            if end < 0:
                raise Unfamiliar("an answer is empty")
        elif pair[0][end - 1] == " ":
            end -= 1
        prompts.append(pair[0][:end])
        for answers, answer in zip(rest, pair, strict=True):
            answers.append(answer[end:])
    if not is_text and not any(prompts):
        raise Unfamiliar("no conversations begin alike, so the type of prompts is not known")
    names = ("prompt", "chosen", "rejected")
    return {
        name: pa.array(values, kind) for name, values in zip(names, (prompts, *rest), strict=True)
    }


def _common(left: str, right: str) -> int | None:
    """Where two texts first differ, if they do before one ends."""
    same, limit = 0, min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return None
    while limit - same > 1:
        middle = (same + limit) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            limit = middle
    return same


def _add_eos(
    table: pa.Table, function: Callable[..., Any], options: Options, names: Sequence[str]
) -> Columns:
    """``add_eos`` of the trainers: texts that do not end with the token get it."""
    eos = options["eos_token"]
    if type(eos) is not str:
        raise Unfamiliar("there is no end token")
    columns = {}
    for name in names:
        if name not in table.column_names:
            continue
        texts = _column(table, name)
        if not pa.types.is_string(texts.type) or texts.null_count:
            raise Unfamiliar(f"{name} is no text")
        ended = pc.binary_join_element_wise(texts, eos, "")
        columns[name] = pc.if_else(pc.ends_with(texts, eos), texts, ended)
    return columns


def _add_eos_sft(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    if {"text", "completion"} <= {*table.column_names}:
        raise Unfamiliar("rows have a text and a completion")
    return _add_eos(table, function, options, ("text", "completion"))


def _tokenize_preferences(
    table: pa.Table, function: Callable[..., Any], options: Options, names: Sequence[str]
) -> Columns:
    """``tokenize_fn`` of DPO and KTO: ids of the prompt, and of each answer after it."""
    parts = [("prompt",), *(("prompt", name) for name in names)]
    columns: dict[str, list[list[int]]] = {f"{name}_ids": [] for name in ("prompt", *names)}
    warn = function.__globals__["logger"].warning
    for prompt, *answers in _encoded(table, options, parts):
        start = len(prompt.ids)
        columns["prompt_ids"].append(prompt.ids)
        for name, answer in zip(names, answers, strict=True):
            if answer.ids[:start] != prompt.ids:
                warn(_MISMATCH.format(name))
            columns[f"{name}_ids"].append(answer.ids[start:])
    return {name: _lists(values, name) for name, values in columns.items()}


def _tokenize_rewards(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    """``tokenize_fn`` of the reward trainer, which also puts the prompt before the answers."""
    names, columns = ("chosen", "rejected"), {}
    if "prompt" in table.column_names:
        prompts = table.column("prompt").to_pylist()
        for name in names:
            whole = [a + b for a, b in zip(prompts, table.column(name).to_pylist(), strict=True)]
            place = table.column_names.index(name)
            columns[name] = pa.array(whole, table.schema.field(place).type)
            table = table.set_column(place, table.schema.field(place), columns[name])
    rows = list(_encoded(table, options, [(name,) for name in names]))
    for place, name in enumerate(names):
        columns[f"{name}_ids"] = _lists([row[place].ids for row in rows], name)
    return columns


def _tokenize_sft(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    """``tokenize_fn`` of supervised fine-tuning: ids, and masks of what is trained on."""
    is_chat, has_prompt = _is_conversational(table), "prompt" in table.column_names
    masks = is_chat and bool(options["assistant_only_loss"])
    field = "messages" if is_chat else options["dataset_text_field"]
    parts = [("prompt",), ("prompt", "completion")] if has_prompt else [(field,)]
    columns: dict[str, list[list[int]]] = {"input_ids": []}
    if masks:
        columns["assistant_masks"] = []
    if has_prompt:
        # Here the masks come first.
        columns = {name: [] for name in (*reversed(columns), "completion_mask")}
    for sequences in _encoded(table, options, parts, masks=masks):
        whole = sequences[-1]
        columns["input_ids"].append(whole.ids)
        if masks:
            columns["assistant_masks"].append(whole.mask)
            if 1 not in whole.mask:
                raise Unfamiliar("a conversation has no answer, which TRL reports")
        if has_prompt:
            prompt = sequences[0].ids
            if whole.ids[: len(prompt)] != prompt:
                function.__globals__["logger"].warning(_MISMATCH.format("completion"))
            mask = [0] * len(prompt) + [1] * (len(whole.ids) - len(prompt))
            columns["completion_mask"].append(mask)
    return {name: _lists(rows, name) for name, rows in columns.items()}


def _build_labels(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    """``build_labels``: ids, and -100 where a mask says so."""
    ids = _column(table, "input_ids")
    labels, offsets = _values(ids).astype(np.int64), ids.offsets
    for name in options["mask_columns"]:
        mask = _column(table, name)
        if not np.array_equal(list_lengths(mask), list_lengths(ids)):
            raise Unfamiliar("a mask is longer or shorter than its ids")
        labels = np.where(_values(mask) != 0, labels, _IGNORED)
    if not len(labels):
        raise Unfamiliar("a batch has no tokens, so its types are not known")
    edges = offsets.to_numpy().astype(np.int32) - offsets[0].as_py()
    return {"labels": pa.ListArray.from_arrays(pa.array(edges, pa.int32()), labels)}


def _truncate(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    """``truncate``: the beginning or the end of ids and labels."""
    cut: slice = options["sl"]
    limit = cut.stop if cut.start is None else -cut.start
    if limit <= 0:
        raise Unfamiliar(f"sequences are cut to {limit}")
    columns = {}
    for name in ("input_ids", "labels"):
        array = _column(table, name)
        values, lengths = _values(array), list_lengths(array)
        kept = np.minimum(lengths, limit)
        if (kept < lengths).any():
            ends = np.cumsum(lengths)
            starts = ends - (lengths if cut.start is None else kept)
            edges = np.concatenate([[0], np.cumsum(kept)])
            places = np.arange(edges[-1]) + np.repeat(starts - edges[:-1], kept)
            offsets = pa.array(edges, array.offsets.type)
            values = pa.array(values[places], array.type.value_type)
            array = type(array).from_arrays(offsets, values, type=array.type)
        columns[name] = array
    return columns


def _keeps_labelled(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    """The filter of supervised fine-tuning: rows with a token to train on."""
    labels = _column(table, "labels")
    is_trained = np.concatenate([[0], np.cumsum(_values(labels) != _IGNORED)])
    edges = labels.offsets.to_numpy() - labels.offsets[0].as_py()
    return {"keeps": pa.array(is_trained[edges[1:]] > is_trained[edges[:-1]])}


def _keeps_short(
    table: pa.Table, function: Callable[..., Any], options: Options, names: Sequence[str], most: int
) -> Columns:
    """The filters of the preference trainers: rows whose sequences are within the limit."""
    limit = inspect.getclosurevars(function).nonlocals["args"].max_length + most
    lengths = [list_lengths(_column(table, name)) for name in names]
    return {"keeps": pa.array(np.maximum.reduce(lengths) <= limit)}


def _shift_completions(table: pa.Table, function: Callable[..., Any], options: Options) -> Columns:
    """``add_kl_completion_ids``: the completion of the row before, in each of stock's batches."""
    ids, size = _column(table, "completion_ids"), options["batch_size"]
    if ids.type != pa.list_(pa.int64()) or not list_lengths(ids).all():
        raise Unfamiliar("a completion has no tokens")
    rows = np.arange(len(ids))
    rows = np.where(rows % size, rows - 1, np.minimum(rows + size, len(ids)) - 1)
    return {"KL_completion_ids": ids.take(pa.array(rows))}


_PREPARE = "{}Trainer._prepare_dataset.<locals>.{}".format
_CHANGES: Mapping[str, Change] = {
    "extract_prompt": _extract_prompt,
    _PREPARE("SFT", "add_eos"): _add_eos_sft,
    _PREPARE("DPO", "add_eos"): partial(_add_eos, names=("chosen", "rejected")),
    _PREPARE("KTO", "add_eos"): partial(_add_eos, names=("completion",)),
    _PREPARE("Reward", "add_eos"): partial(_add_eos, names=("chosen", "rejected")),
    _PREPARE("SFT", "tokenize_fn"): _tokenize_sft,
    _PREPARE("DPO", "tokenize_fn"): partial(_tokenize_preferences, names=("chosen", "rejected")),
    _PREPARE("KTO", "tokenize_fn"): partial(_tokenize_preferences, names=("completion",)),
    _PREPARE("Reward", "tokenize_fn"): _tokenize_rewards,
    _PREPARE("SFT", "build_labels"): _build_labels,
    _PREPARE("SFT", "truncate"): _truncate,
    _PREPARE("SFT", "<lambda>"): _keeps_labelled,
    _PREPARE("DPO", "<lambda>"): partial(_keeps_short, names=("prompt_ids",), most=-1),
    _PREPARE("KTO", "<lambda>"): partial(_keeps_short, names=("prompt_ids",), most=-1),
    _PREPARE("Reward", "<lambda>"): partial(
        _keeps_short, names=("chosen_ids", "rejected_ids"), most=0
    ),
    _PREPARE("KTO", "add_kl_completion_ids"): _shift_completions,
}
"""TRL's row function, by its qualified name, to ours."""


class _Sequence(NamedTuple):
    """A tokenised text."""

    ids: list[int]
    mask: list[int]
    """One where an assistant speaks; empty unless asked for."""


def _encoded(
    table: pa.Table, options: Options, parts: Sequence[tuple[str, ...]], *, masks: bool = False
) -> Iterator[tuple[_Sequence, ...]]:
    """For each row its sequences: the columns named by ``parts``, one after the other, tokenised.

    A prompt that is followed by others with an answer ends with the template's invitation to
    answer. ``masks`` asks for those of the last sequence.
    """
    tokenizer, last = options["processing_class"], len(parts) - 1
    backend = check_tokenizer(tokenizer)
    columns = {name: _column(table, name).to_pylist() for part in parts for name in part}
    is_chat = _is_conversational(table)
    texts: list[str] = []
    spans: list[list[tuple[int, int]]] = []
    if not is_chat and not all(pa.types.is_string(table.field(name).type) for name in columns):
        raise Unfamiliar("texts are no strings")
    chat = _Chat(tokenizer, table, options) if is_chat else None
    for number in range(len(table)):
        for place, part in enumerate(parts):
            if chat is None:
                texts.append("".join([columns[name][number] for name in part]))
                continue
            messages = [message for name in part for message in columns[name][number]]
            invites = part == ("prompt",) and last > 0
            text, found = chat.render(number, messages, invites, masks and place == last)
            texts.append(text)
            spans.append(found)
    set_truncation(tokenizer, None)
    row: list[_Sequence] = []
    encodings = encode_texts(backend, texts, add_special_tokens=not is_chat, offsets=masks)
    for number, encoding in enumerate(encodings):
        ids = encoding.ids
        if too_long(tokenizer, len(ids)):
            tokenizer._eventual_warn_about_too_long_sequence(ids, None, True)
        is_last = len(row) == last
        row.append(_Sequence(ids, _mask(encoding, spans[number]) if masks and is_last else []))
        if is_last:
            yield tuple(row)
            row = []


def _mask(encoding: Any, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Ones for the tokens of these characters, as ``apply_chat_template`` finds them."""
    mask = [0] * len(encoding)
    for first, end in spans:
        start, stop = encoding.char_to_token(first), encoding.char_to_token(end - 1)
        if start is None:
            break
        stop = stop + 1 if stop else len(mask)
        mask[start:stop] = [1] * (stop - start)
    return mask


class _Chat:
    """The conversations of a batch as texts: ``apply_chat_template`` up to its tokenizer call."""

    def __init__(self, tokenizer: Any, table: pa.Table, options: Options) -> None:
        self.tokenizer = tokenizer
        self.tools, self.extra = (
            table.column(name).to_pylist() if name in table.column_names else None
            for name in ("tools", "chat_template_kwargs")
        )
        self.template = options.get("chat_template")
        self.arguments = tokenizer.special_tokens_map
        self.reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}
        self.renderers: dict[bool, Renderer | None] = {}
        for invites in (False, True):
            arguments = {**self.arguments, "add_generation_prompt": invites}
            template = tokenizer.get_chat_template(self.template, None)
            try:
                self.renderers[invites] = find_renderer(template, arguments)
            except Unfamiliar:
                self.renderers[invites] = None

    def render(
        self, row: int, messages: list[Any], invites: bool, wants_spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it an assistant speaks, if asked."""
        tools = self.tools and self.tools[row]
        if isinstance(tools, str):
            tools = json.loads(tools)
        given = {"chat_template": self.template, "tools": tools}
        if self.extra is not None:
            given |= self.extra[row]
        renderer = self.renderers[invites]
        if not wants_spans and tools is None and self.extra is None and renderer is not None:
            # The plan knows messages of a role and a content, both plain texts.
            try:
                shape = tuple([(m["role"], m["content"] != "") for m in messages if len(m) == 2])
                contents = [m["content"] for m in messages]
            except (KeyError, TypeError):
                shape, contents = (), []
            if len(shape) == len(messages) and {*map(type, contents)} == {str}:
                plan = renderer.plan(shape, contents)
                if plan is not None:
                    return plan.fill(contents), []
        from transformers.utils.chat_template_utils import render_jinja_template

        template, tools = given.pop("chat_template"), given.pop("tools")
        if not self.reserved.isdisjoint(given):
            raise Unfamiliar("a row has arguments of apply_chat_template")
        if not messages:
            raise Unfamiliar("a conversation is empty")
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            documents=None,
            chat_template=self.tokenizer.get_chat_template(template, tools),
            return_assistant_tokens_mask=wants_spans,
            continue_final_message=False,
            add_generation_prompt=invites,
            **{**self.arguments, **given},
        )
        return texts[0], spans[0] if wants_spans else []


def _is_conversational(table: pa.Table) -> bool:
    """``is_conversational``, for all rows; it asks any one of the columns that are there."""
    kinds = set()
    for name in _CONVERSATIONAL:
        if name in table.column_names:
            column = _column(table, name)
            kinds.add(_is_chat(column.type))
            if _is_chat(column.type) and (
                column.flatten().null_count or not pc.min(pc.list_value_length(column)).as_py()
            ):
                raise Unfamiliar("a conversation is empty")
    if len(kinds) > 1:
        raise Unfamiliar("there are columns of texts and of conversations")
    return kinds == {True}


def _is_chat(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(
        is_list
        and pa.types.is_struct(kind.value_type)
        and kind.value_type.get_field_index("role") >= 0
    )


def _column(table: pa.Table, name: str) -> pa.Array:
    """A column of a batch as one array without nulls."""
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if array.null_count:
        raise Unfamiliar(f"a row has no {name}")
    return array


def _values(array: pa.Array) -> Any:
    """The integers of all rows."""
    require_integers(array.type)
    values = array.flatten()
    if values.null_count:
        raise Unfamiliar("a token is null")
    return values.to_numpy()


def _lists(rows: Sequence[Sequence[int]], name: str) -> pa.Array:
    """A new column of the type that ``datasets`` would have found."""
    edges = np.fromiter(accumulate(map(len, rows), initial=0), np.int32, len(rows) + 1)
    if not edges[-1]:
        raise Unfamiliar("a batch has no tokens, so its types are not known")
    kind = np.int32 if name == "input_ids" else np.int64
    values = np.fromiter(chain.from_iterable(rows), kind, int(edges[-1]))
    return pa.ListArray.from_arrays(pa.array(edges), pa.array(values))
