"""TRL's trainers prepare their datasets a table at a time: the steps are theirs, the rows are ours.

``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer`` prepare a dataset in up to six
passes of ``map`` and ``filter`` over rows. Here their ``_prepare_dataset`` runs whole, with its
conditions, errors and warnings, on a dataset that knows the row functions it defines, and answers
with ours, which take 1,000 rows as an Arrow table. Texts go to the Rust tokenizer together (see
``tokenizers``), the rest is arithmetic on columns. Passes, progress bars, processes and cache files
stay what they are, and fingerprints are those of stock's arguments: either finds what the other has
cached.

A pass that is unfamiliar is TRL's own, from its first row: datasets that are streamed, formatted or
hold images, tokenizers with methods of their own, texts beside conversations (TRL looks at any one
of the columns), nulls, and batches without a token, whose type is not known. Costs the tokenizer's
own time and some 30 µs a row.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.axolotl.data import list_lengths, require_integers
from fast_axolotl.axolotl.filters import require_unchanging, stock_fingerprint
from fast_axolotl.axolotl.patching import Final, Unfamiliar, tally
from fast_axolotl.axolotl.tokenizers import check_tokenizer, encode_texts, set_truncation
from fast_axolotl.errors import MissingExtraError

try:
    from datasets import Dataset
except ImportError as error:
    raise MissingExtraError("TRL's datasets need their package: pip install datasets") from error

_BATCH_ROWS = 1000
"""Rows of a table; as many as stock's ``map`` writes at once."""

_IGNORED = -100
_CONVERSATIONAL = ("prompt", "chosen", "rejected", "completion", "messages")
"""Columns by which TRL tells conversations from texts."""

_PAIR = ("chosen", "rejected")
_MISMATCH = (
    "Mismatch between tokenized prompt and the start of tokenized prompt+{}. "
    "This may be due to unexpected tokenizer behavior, whitespace issues, or special "
    "token handling. Verify that the tokenizer is processing text consistently."
)

Columns = dict[str, pa.Array]


def prepare_dataset(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``_prepare_dataset`` of four trainers: it runs on a dataset that we watch."""
    if type(dataset) is not Dataset:
        raise Unfamiliar("the dataset is streamed or not a plain dataset")
    trainer = next(
        kind
        for kind in type(self).__mro__
        if kind.__module__.startswith("trl.trainer.") and "_prepare_dataset" in vars(kind)
    )
    switch = f"trl-{trainer.__name__.removesuffix('Trainer').lower()}"
    prepare = inspect.unwrap(vars(trainer)["_prepare_dataset"])
    try:
        result = prepare(self, _Watched.of(dataset, switch), *args, **kwargs)
    except Exception as error:
        # A pass that could not be ours was TRL's by then, and so is the error.
        raise Final(error) from error
    return result.plain() if type(result) is _Watched else result


class _Watched(Dataset):  # type: ignore[misc]
    """A dataset that knows TRL's row functions; never seen outside of TRL's method."""

    @classmethod
    def of(cls, dataset: Any, switch: str) -> Any:
        watched = copy.copy(dataset)
        watched.__class__, watched.switch = cls, switch
        return watched

    def plain(self) -> Any:
        """The same rows as a dataset of the usual kind."""
        dataset = copy.copy(self)
        del dataset.switch
        dataset.__class__ = Dataset
        return dataset

    def map(self, function: Any = None, *args: Any, **options: Any) -> Any:
        return self._answer("map", function, *args, **options)

    def filter(self, function: Any = None, *args: Any, **options: Any) -> Any:
        return self._answer("filter", function, *args, **options)

    def _answer(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        dataset, result = self.plain(), None
        change = _CHANGES.get(getattr(function, "__qualname__", ""))
        if change is not None:
            try:
                result = _run(dataset, name, function, change, *args, **options)
            except Exception as error:  # noqa: BLE001  whatever it was, TRL's own pass decides
                kind = "" if isinstance(error, Unfamiliar) else f"{type(error).__name__}: "
                tally(self.switch, f"{function.__name__}: {kind}{error}", len(dataset))
        if result is None:
            result = getattr(dataset, name)(function, *args, **options)
        return _Watched.of(result, self.switch)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows, and the function that stock would call with each of them."""

    table: pa.Table
    function: Callable[..., Any]
    options: Mapping[str, Any]
    """Further arguments of the function, and the size of its batches if it takes batches."""
    told: set[tuple[int, ...]] = field(default_factory=set)
    """Ends of prompts that TRL has warned of."""

    def __contains__(self, name: str) -> bool:
        return name in self.table.column_names

    def column(self, name: str) -> pa.Array:
        """A column without nulls."""
        array = self.table.column(name).combine_chunks()
        if isinstance(array, pa.ChunkedArray) or array.null_count:
            raise Unfamiliar(f"a row has no {name}, or the column is too large for one array")
        return array

    def integers(self, name: str) -> tuple[Any, Any]:
        """The values of a column of lists, all rows together, and where each row begins."""
        array = self.column(name)
        require_integers(array.type)
        values = array.flatten()
        if values.null_count:
            raise Unfamiliar("a token is null")
        return values.to_numpy(), np.concatenate([[0], np.cumsum(list_lengths(array))])

    def end_of_prompt(self, row: int, prompt: list[int], answers: Mapping[str, list[int]]) -> int:
        """How many tokens are the prompt; TRL warns where an answer does not begin with it.

        Since TRL 1.16 the prompt is what they have in common, and each kind of rest is told once.
        """
        names, end = self.function.__globals__, len(prompt)
        others = [name for name, ids in answers.items() if ids[:end] != prompt]
        if others and "common_prefix_length" in names:
            end = min(names["common_prefix_length"](prompt, answers[name]) for name in others)
            if (rest := tuple(prompt[end:])) not in self.told:
                self.told.add(rest)
                given = {key: value for key, value in self.options.items() if key != "batch_size"}
                self.function(self.table.slice(row, 1).to_pylist()[0], **given)
        else:
            for name in others:
                names["logger"].warning(_MISMATCH.format(name))
        return end


Change = Callable[[_Batch], Columns]
"""What a row function does, for a batch: the columns that are new or other than before."""


def _run(
    dataset: Any,
    name: str,
    function: Callable[..., Any],
    change: Change,
    *,
    fn_kwargs: Mapping[str, Any] | None = None,
    remove_columns: str | Sequence[str] | None = None,
    batched: bool = False,
    batch_size: int | None = None,
    **shown: Any,
) -> Any:
    """What ``map`` or ``filter`` with ``function`` gives, where ``change`` is that for a batch."""
    if not len(dataset) or dataset.list_indexes():
        raise Unfamiliar("the dataset is empty or has an index")
    if dataset._format_type is not None or dataset._format_kwargs or dataset._output_all_columns:
        raise Unfamiliar("the dataset has a format")
    require_unchanging(dataset, {})
    removed = [remove_columns] if isinstance(remove_columns, str) else remove_columns
    hashed: dict[str, Any] = {"num_proc": shown.get("num_proc")}
    if name == "map":
        hashed = {"fn_kwargs": fn_kwargs or {}, "remove_columns": removed}
        hashed["batch_size"] = None if batch_size == _BATCH_ROWS else batch_size
    fingerprint = stock_fingerprint(
        dataset,
        "datasets.arrow_dataset.Dataset." + ("_map_single" if name == "map" else "filter@2.0.1"),
        function,
        batched,
        {key: value for key, value in hashed.items() if value is not None},
    )
    # Stock's batches must not be cut.
    rows = _BATCH_ROWS if batch_size is None else batch_size * -(-_BATCH_ROWS // batch_size)
    options = {**(fn_kwargs or {}), "batch_size": batch_size}

    def changed(table: pa.Table) -> Any:
        columns = change(_Batch(table, function, options))
        if name == "filter":
            return columns["keeps"]
        table = table.drop_columns([name for name in removed or () if name not in columns])
        for column, array in columns.items():
            if column in table.column_names:
                place = table.column_names.index(column)
                table = table.set_column(place, table.field(place), array)
            else:
                table = table.append_column(column, array)
        return table

    source = copy.copy(dataset)
    source._format_type = "arrow"
    ours = {"batched": True, "batch_size": rows, "writer_batch_size": rows, **shown}
    result = getattr(source, name)(changed, **ours, new_fingerprint=fingerprint)
    result._format_type, result._fingerprint = None, fingerprint
    return result


def _extract_prompt(batch: _Batch) -> Columns:
    """``extract_prompt``: what both answers begin with, and what is left of them."""
    answers = [batch.column(name) for name in _PAIR]
    kind = answers[0].type
    is_text = pa.types.is_string(kind)
    # Types of prompts are found from their values; that of texts that are not null is known.
    is_known = is_text or (
        _is_chat(kind)
        and all(pa.types.is_string(field.type) for field in kind.value_type)
        and not any(part.null_count for side in answers for part in side.flatten().flatten())
    )
    if kind != answers[1].type or not is_known or "prompt" in batch:
        raise Unfamiliar(f"prompts are extracted from {kind}")
    rows: list[tuple[Any, Any, Any]] = []
    for chosen, rejected in zip(*(side.to_pylist() for side in answers), strict=True):
        pairs = enumerate(zip(chosen, rejected, strict=False))
        end = next((place for place, (one, other) in pairs if one != other), None)
        if end is None:
            end = min(len(chosen), len(rejected)) - 1
            if end < 0:
                raise Unfamiliar("a completion is empty")
        elif chosen[end - 1] == " ":
            end -= 1
        rows.append((chosen[:end], chosen[end:], rejected[end:]))
    prompts, *rest = zip(*rows, strict=True)
    if not is_text and not any(prompts):
        raise Unfamiliar("no pair shares a prompt, so the type of prompts is unknown")
    sides = zip(("prompt", *_PAIR), (prompts, *rest), strict=True)
    return {name: pa.array(side, kind) for name, side in sides}


def _add_eos(batch: _Batch, names: Sequence[str]) -> Columns:
    """``add_eos`` of the trainers: texts that do not end with the token get it."""
    eos, columns = batch.options["eos_token"], {}
    if not names:
        names = (batch.options.get("dataset_text_field", "text"), "completion")
        if all(name in batch for name in names):
            raise Unfamiliar("rows have both a text and a completion")
    for name in names:
        if name in batch:
            texts = batch.column(name)
            if not pa.types.is_string(texts.type) or type(eos) is not str:
                raise Unfamiliar(f"{name} is not text, or there is no EOS token")
            ended = pc.binary_join_element_wise(texts, eos, "")
            columns[name] = pc.if_else(pc.ends_with(texts, eos), texts, ended)
    return columns


def _tokenize_preferences(batch: _Batch, names: Sequence[str]) -> Columns:
    """``tokenize_fn`` of DPO and KTO: ids of the prompt, and of each answer after it."""
    columns: dict[str, list[list[int]]] = {f"{name}_ids": [] for name in ("prompt", *names)}
    parts = [("prompt",), *(("prompt", name) for name in names)]
    for number, ((prompt, _), *sequences) in enumerate(_encoded(batch, parts)):
        answers = {name: ids for name, (ids, _) in zip(names, sequences, strict=True)}
        end = batch.end_of_prompt(number, prompt, answers)
        columns["prompt_ids"].append(prompt[:end])
        for name, ids in answers.items():
            columns[f"{name}_ids"].append(ids[end:])
    return {name: _lists(rows, name) for name, rows in columns.items()}


def _tokenize_rewards(batch: _Batch) -> Columns:
    """``tokenize_fn`` of the reward trainer, which leaves the prompt in front of the answers."""
    columns = {}
    if "prompt" in batch:
        prompts, table = batch.column("prompt").to_pylist(), batch.table
        for name in _PAIR:
            answers = batch.column(name)
            pairs = zip(prompts, answers.to_pylist(), strict=True)
            columns[name] = pa.array([prompt + answer for prompt, answer in pairs], answers.type)
            table = table.set_column(table.column_names.index(name), name, columns[name])
        batch = _Batch(table, batch.function, batch.options)
    rows = [[ids for ids, _ in row] for row in _encoded(batch, [(name,) for name in _PAIR])]
    for name, ids in zip(_PAIR, zip(*rows, strict=True), strict=True):
        columns[f"{name}_ids"] = _lists(ids, name)
    return columns


def _tokenize_sft(batch: _Batch) -> Columns:
    """``tokenize_fn`` of supervised fine-tuning: ids, and masks of what is trained on."""
    is_chat, has_prompt = _is_conversational(batch), "prompt" in batch
    masks = is_chat and bool(batch.options["assistant_only_loss"])
    field = "messages" if is_chat else batch.options["dataset_text_field"]
    parts = [("prompt",), ("prompt", "completion")] if has_prompt else [(field,)]
    names = ["input_ids", "assistant_masks"][: 1 + masks]
    names = [*reversed(names), "completion_mask"] if has_prompt else names
    columns: dict[str, list[list[int]]] = {name: [] for name in names}
    for number, (*before, (ids, mask)) in enumerate(_encoded(batch, parts, masks=masks)):
        columns["input_ids"].append(ids)
        if masks:
            columns["assistant_masks"].append(mask)
            if 1 not in mask:
                raise Unfamiliar("a conversation has no completion, which TRL reports")
        for prompt, _ in before:
            end = batch.end_of_prompt(number, prompt, {"completion": ids})
            columns["completion_mask"].append([0] * end + [1] * (len(ids) - end))
    return {name: _lists(rows, name) for name, rows in columns.items()}


def _build_labels(batch: _Batch) -> Columns:
    """``build_labels``: ids, and -100 where a mask says so."""
    ids, edges = batch.integers("input_ids")
    labels = ids.astype(np.int64)
    for name in batch.options["mask_columns"]:
        mask, ends = batch.integers(name)
        lengths = np.diff(edges)
        if (np.diff(ends) < lengths).any():
            raise Unfamiliar("a mask is shorter than its input_ids")
        mask = mask[np.arange(edges[-1]) + np.repeat(ends[:-1] - edges[:-1], lengths)]
        labels = np.where(mask != 0, labels, _IGNORED)
    if not len(labels):
        raise Unfamiliar("a batch has no tokens, so its types are unknown")
    return {"labels": pa.ListArray.from_arrays(pa.array(edges, pa.int32()), labels)}


def _truncate(batch: _Batch) -> Columns:
    """``truncate``: the beginning of ids and labels."""
    limit = batch.options["sl"].stop
    if not limit:
        raise Unfamiliar("truncation keeps the end of sequences")
    columns = {name: batch.column(name) for name in ("input_ids", "labels")}
    return {
        name: pc.list_slice(array, 0, limit).cast(array.type) for name, array in columns.items()
    }


def _keep_labelled(batch: _Batch) -> Columns:
    """The filter of supervised fine-tuning: rows with a token to train on."""
    labels, edges = batch.integers("labels")
    before = np.concatenate([[0], np.cumsum(labels != _IGNORED)])[edges]
    return {"keeps": pa.array(np.diff(before) > 0)}


def _keep_short(batch: _Batch, names: Sequence[str], beyond: int) -> Columns:
    """The filters of the preference trainers: rows whose sequences are within the limit."""
    limit = inspect.getclosurevars(batch.function).nonlocals["args"].max_length + beyond
    longest = np.maximum.reduce([list_lengths(batch.column(f"{name}_ids")) for name in names])
    return {"keeps": pa.array(longest < limit)}


def _shift_completions(batch: _Batch) -> Columns:
    """``add_kl_completion_ids``: the completion of the row before, in each of stock's batches."""
    ids, size = batch.column("completion_ids"), batch.options["batch_size"]
    if ids.type != pa.list_(pa.int64()) or not list_lengths(ids).all():
        raise Unfamiliar("a completion has no tokens")
    rows = np.arange(len(ids))
    rows = np.where(rows % size, rows - 1, np.minimum(rows + size, len(ids)) - 1)
    return {"KL_completion_ids": ids.take(pa.array(rows))}


_CHANGES: Mapping[str, Change] = {"extract_prompt": _extract_prompt} | {
    f"{trainer}Trainer._prepare_dataset.<locals>.{name}": change
    for trainer, name, change in (
        ("SFT", "add_eos", partial(_add_eos, names=())),
        ("SFT", "tokenize_fn", _tokenize_sft),
        ("SFT", "build_labels", _build_labels),
        ("SFT", "truncate", _truncate),
        ("SFT", "<lambda>", _keep_labelled),
        ("DPO", "add_eos", partial(_add_eos, names=_PAIR)),
        ("DPO", "tokenize_fn", partial(_tokenize_preferences, names=_PAIR)),
        ("DPO", "<lambda>", partial(_keep_short, names=["prompt"], beyond=0)),
        ("KTO", "add_eos", partial(_add_eos, names=["completion"])),
        ("KTO", "tokenize_fn", partial(_tokenize_preferences, names=["completion"])),
        ("KTO", "<lambda>", partial(_keep_short, names=["prompt"], beyond=0)),
        ("KTO", "add_kl_completion_ids", _shift_completions),
        ("Reward", "add_eos", partial(_add_eos, names=_PAIR)),
        ("Reward", "tokenize_fn", _tokenize_rewards),
        ("Reward", "<lambda>", partial(_keep_short, names=_PAIR, beyond=1)),
    )
}
"""TRL's row function, by its qualified name, to ours."""


Sequences = list[tuple[list[int], list[int]]]
"""Ids, and ones where an assistant speaks (empty unless asked for), of each text of a row."""


def _encoded(
    batch: _Batch, parts: Sequence[tuple[str, ...]], *, masks: bool = False
) -> Iterator[Sequences]:
    """For each row its sequences: the columns named by ``parts``, one after the other, tokenised.

    A prompt that is followed by others with an answer ends with the template's invitation to
    answer. ``masks`` asks for those of the last sequence.
    """
    tokenizer, last = batch.options["processing_class"], len(parts) - 1
    backend = check_tokenizer(tokenizer)
    columns = {name: batch.column(name) for part in parts for name in part}
    is_chat = _is_conversational(batch)
    if not is_chat and not all(pa.types.is_string(column.type) for column in columns.values()):
        raise Unfamiliar("texts are not strings")
    values = {name: column.to_pylist() for name, column in columns.items()}
    chat = _Chat(tokenizer, batch) if is_chat else None
    texts: list[str] = []
    spans: list[list[tuple[int, int]]] = []
    for number in range(len(batch.table)):
        for place, part in enumerate(parts):
            if chat is None:
                texts.append("".join([values[name][number] for name in part]))
                continue
            messages = [message for name in part for message in values[name][number]]
            invites = part == ("prompt",) and last > 0
            text, found = chat.render(number, messages, invites, masks and place == last)
            texts.append(text)
            spans.append(found)
    set_truncation(tokenizer, None)
    row: Sequences = []
    encodings = encode_texts(backend, texts, add_special_tokens=not is_chat, offsets=masks)
    for number, encoding in enumerate(encodings):
        ids = encoding.ids
        if len(ids) > tokenizer.model_max_length:
            tokenizer._eventual_warn_about_too_long_sequence(ids, None, True)
        is_last = len(row) == last
        row.append((ids, _mask(encoding, spans[number]) if masks and is_last else []))
        if is_last:
            yield row
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

    def __init__(self, tokenizer: Any, batch: _Batch) -> None:
        self.tokenizer = tokenizer
        self.template = batch.options.get("chat_template")
        self.tools, self.extra = (
            batch.table.column(name).to_pylist() if name in batch else None
            for name in ("tools", "chat_template_kwargs")
        )
        self.arguments = tokenizer.special_tokens_map
        self.reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}

    def render(
        self, row: int, messages: list[Any], invites: bool, wants_spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it an assistant speaks, if asked."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = None if self.tools is None else self.tools[row]
        given = {
            "chat_template": self.template,
            "tools": json.loads(tools) if isinstance(tools, str) else tools,
            **({} if self.extra is None else self.extra[row]),
        }
        template, tools = given.pop("chat_template"), given.pop("tools")
        if not self.reserved.isdisjoint(given):
            raise Unfamiliar("a row has extra arguments for the chat template")
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


def _is_conversational(batch: _Batch) -> bool:
    """``is_conversational``, for all rows: TRL asks any one of the columns that are there."""
    kinds = set()
    for name in _CONVERSATIONAL:
        if name in batch:
            column = batch.column(name)
            kinds.add(is_chat := _is_chat(column.type))
            if is_chat and (
                column.flatten().null_count or not pc.min(pc.list_value_length(column)).as_py()
            ):
                raise Unfamiliar("a conversation is empty")
    if len(kinds) > 1:
        raise Unfamiliar("some columns hold text and some hold conversations")
    return kinds == {True}


def _is_chat(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_struct = is_list and pa.types.is_struct(kind.value_type)
    return bool(is_struct and kind.value_type.get_field_index("role") >= 0)


def _lists(rows: Sequence[Sequence[int]], name: str) -> pa.Array:
    """A new column, of the type that ``datasets`` would have found."""
    edges = np.fromiter(accumulate(map(len, rows), initial=0), np.int32, len(rows) + 1)
    if not edges[-1]:
        raise Unfamiliar("a batch has no tokens, so its types are unknown")
    kind = np.int32 if name == "input_ids" else np.int64
    values = np.fromiter(chain.from_iterable(rows), kind, int(edges[-1]))
    return pa.ListArray.from_arrays(pa.array(edges), pa.array(values))
