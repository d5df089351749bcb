"""Function by function in one process: stock's against ours, equal answers first, then by turns.

Run as ``python -m benchmarks.axolotl_functions ROWS REPEATS MODEL FOLDER`` and asked over its pipes
to ``measure`` one function after the other. Every function of Axolotl that is replaced has an input
of the size it meets in practice: 20,000 tokenized rows of 365 tokens on average, a fifth of them
repeated; ten times fewer documents, conversations and preferences. It is looked up in its module at
every call, so that it is stock's or ours as ``install()`` and ``uninstall()`` leave it. The answers
of both are compared value by value and type by type, and so are the states of the random generators
afterwards. The first call of each is timed apart: it compiles, imports and fills caches.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa

import fast_axolotl
from benchmarks.axolotl_inputs import (
    PREFERENCE_LENGTH,
    PROCESSES,
    Row,
    chat_rows,
    documents,
    preference_rows,
)
from benchmarks.axolotl_runs import OURS, STOCK, by_turns, prepared_difference
from benchmarks.race import peer_module
from benchmarks.worker import serve, take_stdout
from benchmarks.workloads import draw_lengths, token_rows

_LEAST_SECONDS = 0.2
_MOST_PASSES = 20
_ARMS: Mapping[str, Callable[[], bool]] = {
    STOCK: fast_axolotl.uninstall,
    OURS: fast_axolotl.install,
}


def main(rows: str, repeats: str, model: str, folder: str) -> None:
    """Answers until there are no more requests."""
    answers = take_stdout()
    logging.disable(logging.WARNING)
    datasets = peer_module("datasets")
    datasets.disable_caching()
    datasets.disable_progress_bars()
    # Workers that are spawned import the main module: let it be that of ``axolotl preprocess``.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("axolotl.cli.main")
    fast_axolotl.uninstall()
    inputs = Inputs(int(rows), Path(model), Path(folder))

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        return _measure(SUBJECTS[request["name"]](inputs), int(repeats))

    serve(answers, {}, {"measure": measure})


def _measure(subject: Subject, repeats: int) -> dict[str, Any]:
    answers, first = {}, {}
    before = _calls()
    for arm in (STOCK, OURS):
        _ARMS[arm]()
        answers[arm], first[arm] = _pass(subject, is_kept=True)
    reason = answer_difference(*answers.values())
    answered = {name: calls - before.get(name, 0) for name, calls in _calls().items()}
    fallbacks = [
        f"{patch.name}: {reason}"
        for patch in fast_axolotl.status().patches
        for reason, _ in patch.fallbacks
    ]
    answers.clear()
    seconds: dict[str, list[float]] = {STOCK: [], OURS: []}
    for arm, _ in by_turns(repeats):
        _ARMS[arm]()
        # Not before every pass: with all of Axolotl in the process it takes longer than most.
        gc.collect()
        passes = [_pass(subject)[1]]
        while sum(passes) < _LEAST_SECONDS and len(passes) < _MOST_PASSES:
            passes.append(_pass(subject)[1])
        seconds[arm].append(median(passes))
    _ARMS[STOCK]()
    return {
        "text": subject.text,
        "rows": subject.rows,
        "unit": subject.unit,
        "reason": reason,
        "seconds": seconds,
        "first": first,
        "answered": {name: calls for name, calls in answered.items() if calls},
        "fallbacks": fallbacks,
    }


def _pass(subject: Subject, *, is_kept: bool = False) -> tuple[Any, float]:
    """How long a call took; the first ones are kept, with the generators' states after them."""
    numpy, torch = peer_module("numpy"), peer_module("torch")
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    given = subject.prepare()
    start = time.perf_counter()
    answer = subject.call(given)
    taken = time.perf_counter() - start
    if is_kept:
        states = [
            repr(random.getstate()),
            repr([numpy.asarray(part).tolist() for part in numpy.random.get_state()]),
            repr(torch.get_rng_state().tolist()),
        ]
        return {"answer": subject.look(given, answer), "generators": states}, taken
    if isinstance(given, Stopwatch):
        taken -= given.seconds
    if isinstance(given, Path):
        shutil.rmtree(given)
    return None, taken


def _calls() -> dict[str, int]:
    """Calls that ours answered, by the name of the replacement."""
    found: dict[str, int] = {}
    for patch in fast_axolotl.status().patches:
        found[patch.name] = found.get(patch.name, 0) + patch.calls
    return found


def answer_difference(stock: Any, ours: Any, place: str = "answer") -> str | None:
    """How ours differs from stock's, type or value; ``None`` where it does not."""
    if type(stock) is not type(ours):
        return f"{place}: a {type(ours).__name__} in place of a {type(stock).__name__}"
    if isinstance(stock, Path):
        return prepared_difference(stock, ours)
    if hasattr(stock, "_fingerprint"):
        return _dataset_difference(stock, ours, place)
    if hasattr(stock, "dtype"):
        is_equal = (stock.dtype, stock.shape) == (ours.dtype, ours.shape) and bool(
            (stock == ours).all()
        )
        return None if is_equal else f"{place}: other values, or {ours.dtype} of {ours.shape}"
    parts: Iterable[str | None] = ()
    if isinstance(stock, Mapping):
        if list(stock) != list(ours):
            return f"{place}: {list(ours)} in place of {list(stock)}"
        parts = (answer_difference(stock[key], ours[key], f"{place} {key}") for key in stock)
    elif isinstance(stock, list | tuple):
        if len(stock) != len(ours):
            return f"{place}: {len(ours):,} items in place of {len(stock):,}"
        kinds, found = ({type(item) for item in items} for items in (stock, ours))
        if kinds != found:
            return f"{place}: items of {found} in place of {kinds}"
        if kinds <= {int, str, float, bool}:
            return None if stock == ours else f"{place}: other values"
        pairs = enumerate(zip(stock, ours, strict=True))
        parts = (answer_difference(*pair, f"{place}[{index}]") for index, pair in pairs)
    elif stock != ours:
        return f"{place}: {ours!r} in place of {stock!r}"[:200]
    return next((reason for reason in parts if reason is not None), None)


def _dataset_difference(stock: Any, ours: Any, place: str) -> str | None:
    if stock.features != ours.features or stock.column_names != ours.column_names:
        return f"{place}: {ours.features} in place of {stock.features}"[:200]
    if len(stock) != len(ours):
        return f"{place}: {len(ours):,} rows in place of {len(stock):,}"
    theirs, found = (data.with_format("arrow")[:] for data in (stock, ours))
    other = [name for name in theirs.column_names if not found[name].equals(theirs[name])]
    return f"{place}: other values in {', '.join(other)}" if other else None


# The functions and their inputs.

_LENGTH = 4096
_BIN_SIZE = 200
_GROUP_SIZE = 100_000
"""Axolotl's defaults."""
_PACKS = 16
_DOCUMENT_BYTES = 2000
_MANY_TURNS = 20
_ROWS = "lognormal, mean 365"


@dataclass(frozen=True, slots=True)
class Subject:
    """A function and its input."""

    text: str
    rows: int
    unit: str
    call: Callable[[Any], Any]
    """One pass, timed; takes what ``prepare`` gave."""
    prepare: Callable[[], Any] = lambda: None
    """What every pass needs anew: objects that a pass uses up, a folder to write to."""
    look: Callable[[Any, Any], Any] = lambda _, answer: answer
    """From what was prepared and the answer, what has to be equal."""


class Inputs:
    """What the subjects share, made when it is first asked for."""

    def __init__(self, rows: int, model: Path, folder: Path) -> None:
        self.rows = rows
        self.few = max(1, rows // 10)
        self._folder = folder
        self._model = model
        self._numbers = count()

    def new_folder(self) -> Path:
        return self._folder / f"saved-{next(self._numbers)}"

    def config(self, **changes: Any) -> Any:
        """As ``axolotl preprocess`` has it."""
        source = {"path": "json", "type": "pretrain", "text_column": "text"}
        return peer_module("axolotl.utils.dict").DictDefault(
            {
                "dataset_num_proc": PROCESSES,
                "is_preprocess": True,
                "min_sample_len": 2,
                "sample_packing": True,
                "sequence_len": _LENGTH,
                "train_on_inputs": False,
                "pretraining_dataset": [source],
                **changes,
            }
        )

    @cached_property
    def tokenizer(self) -> Any:
        return peer_module("transformers").AutoTokenizer.from_pretrained(str(self._model))

    @cached_property
    def dataset(self) -> Any:
        """Tokenized rows in a mapped file, as they come out of tokenisation."""
        table, path = token_rows(self.rows), self._folder / "rows.arrow"
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        return peer_module("datasets").Dataset.from_file(str(path))

    @cached_property
    def packed(self) -> Any:
        """The same with the columns for packing."""
        with_columns = peer_module("axolotl.utils.trainer").process_datasets_for_packing
        return with_columns(self.config(), self.dataset, None)[0]

    @cached_property
    def texts(self) -> list[str]:
        return list(documents(self.few, _DOCUMENT_BYTES))

    @cached_property
    def packs(self) -> list[list[int]]:
        """Rows of the dataset that fill packs."""
        packs: list[list[int]] = [[]]
        room = _LENGTH
        for index, length in enumerate(self.packed["length"]):
            if length > room:
                if len(packs) == _PACKS:
                    break
                packs.append([])
                room = _LENGTH
            packs[-1].append(index)
            room -= length
        return packs

    @cached_property
    def collator(self) -> Any:
        return peer_module("axolotl.utils.collators").V2BatchSamplerDataCollatorForSeq2Seq(
            self.tokenizer, padding=True, pad_to_multiple_of=_LENGTH, return_tensors="pt"
        )


def _dedupe(inputs: Inputs) -> Subject:
    module, dataset = peer_module("axolotl.utils.data.utils"), inputs.packed
    call = lambda _: module._deduplicate_dataset(dataset)[0]  # noqa: E731
    return Subject("_deduplicate_dataset", len(dataset), "rows", call)


def _save(inputs: Inputs) -> Subject:
    """The workers that stock spawns import what its main module does: this file."""
    module, dataset = peer_module("axolotl.utils.data.shared"), inputs.packed

    def save(folder: Path) -> Path:
        config = inputs.config(dataset_prepared_path=str(folder))
        module.save_preprocessed_dataset(config, dataset, "hash", "train")
        return folder

    return Subject("save_preprocessed_dataset", len(dataset), "rows", save, inputs.new_folder)


def _long(inputs: Inputs) -> Subject:
    module, dataset = peer_module("axolotl.utils.data.utils"), inputs.dataset
    length, config = _LENGTH // 4, inputs.config()
    return Subject(
        f"handle_long_seq_in_dataset, {length} tokens",
        len(dataset),
        "rows",
        lambda _: module.handle_long_seq_in_dataset(dataset, length, config),
    )


def _packing(inputs: Inputs) -> Subject:
    module, dataset = peer_module("axolotl.utils.trainer"), inputs.dataset
    config = inputs.config()
    return Subject(
        "process_datasets_for_packing",
        len(dataset),
        "rows",
        lambda _: module.process_datasets_for_packing(config, dataset, None)[0],
    )


def _lengths(inputs: Inputs, *, is_packed: bool) -> Subject:
    module = peer_module("axolotl.utils.samplers.utils")
    dataset = inputs.packed if is_packed else inputs.dataset
    text = f"get_dataset_lengths, {'with' if is_packed else 'without'} a length column"
    return Subject(text, len(dataset), "rows", lambda _: module.get_dataset_lengths(dataset))


def _pack_parallel(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.utils.samplers.multipack")
    lengths = draw_lengths(_ROWS, 5 * inputs.rows).astype("int32")
    options = {"bin_capacity": _LENGTH, "group_size": _GROUP_SIZE, "bin_size": _BIN_SIZE}
    return Subject(
        f"pack_parallel, {PROCESSES} processes",
        len(lengths),
        "lengths",
        lambda _: module.pack_parallel(lengths, **options, num_processes=PROCESSES),
    )


def _sampler(inputs: Inputs) -> Subject:
    module, torch = peer_module("axolotl.utils.samplers.multipack"), peer_module("torch")
    lengths = draw_lengths(_ROWS, inputs.rows)

    def prepare() -> Any:
        return module.MultipackBatchSampler(
            torch.utils.data.RandomSampler(range(len(lengths))),
            batch_size=1,
            batch_max_len=_LENGTH,
            lengths=lengths,
            bin_size=_BIN_SIZE,
            group_size=_GROUP_SIZE,
            num_processes=PROCESSES,
        )

    return Subject(
        f"len(MultipackBatchSampler), {PROCESSES} processes",
        len(lengths),
        "lengths",
        len,
        prepare,
        lambda sampler, answer: [answer, sampler.efficiency(), list(sampler)],
    )


def _collate(inputs: Inputs) -> Subject:
    dataset, collator = inputs.packed.remove_columns("length"), inputs.collator
    packs = [[dataset[index] for index in pack] for pack in inputs.packs]
    text = f"V2BatchSamplerDataCollatorForSeq2Seq, packs of {_LENGTH}, from lists"
    return Subject(text, len(packs), "packs", lambda _: [collator([pack]) for pack in packs])


def _fetch(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.monkeypatch.data.batch_dataset_fetcher")
    dataset, packs = inputs.packed.remove_columns("length"), inputs.packs
    return Subject(
        f"_MapDatasetFetcher.fetch with the V2 collator, packs of {_LENGTH}",
        len(packs),
        "packs",
        lambda fetcher: [fetcher.fetch([pack]) for pack in packs],
        lambda: module._MapDatasetFetcher(dataset, True, inputs.collator, True),
    )


class Stopwatch:
    """Times the calls of a tokenizer, which nobody replaces, inside those of a function."""

    def __init__(self, kind: Any) -> None:
        self._owner = next(base for base in kind.__mro__ if "__call__" in vars(base))
        self._stock = vars(self._owner)["__call__"]
        self.seconds = 0.0

    def __enter__(self) -> None:
        def timed(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = self._stock(tokenizer, *args, **kwargs)
            self.seconds += time.perf_counter() - start
            return answer

        self._owner.__call__ = timed

    def __exit__(self, *error: object) -> None:
        self._owner.__call__ = self._stock


def _encode(inputs: Inputs, *, is_apart: bool) -> Subject:
    module = peer_module("axolotl.utils.data.streaming")
    texts, tokenizer = inputs.texts, inputs.tokenizer

    def call(watch: Stopwatch | None) -> Any:
        with watch or nullcontext():
            return module.encode_streaming({"text": texts}, tokenizer, _LENGTH // 2)

    return Subject(
        "encode_streaming" + (", without the tokenizer's own time" if is_apart else ""),
        len(texts),
        "documents",
        call,
        lambda: Stopwatch(type(tokenizer)) if is_apart else None,
    )


def _encode_packed(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.utils.data.streaming")
    texts, tokenizer, length = inputs.texts, inputs.tokenizer, _LENGTH // 2
    config = inputs.config(sequence_len=length, dataset_num_proc=None)
    wrap = partial(
        peer_module("axolotl.utils.data.wrappers").get_dataset_wrapper,
        dataset_config=config.pretraining_dataset[0],
        tokenizer=tokenizer,
        cfg=config,
        dataset_base_type="pretrain",
    )
    collator = peer_module("axolotl.utils.collators").PretrainingBatchSamplerDataCollatorForSeq2Seq(
        tokenizer, return_tensors="pt", padding=True, pad_to_multiple_of=length, multipack_attn=True
    )

    def call(_: Any) -> Any:
        return module.encode_packed_streaming(
            collator,
            wrap,
            {"text": texts},
            bin_size=_BIN_SIZE,
            max_seq_length=length,
            batch_size=1,
            multipack_attn=True,
        )

    return Subject("encode_packed_streaming", len(texts), "documents", call)


def _chat(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.prompt_strategies.chat_template")
    wrap = peer_module("axolotl.datasets").wrap_dataset_for_tokenized_prompt
    rows = list(islice(chat_rows(random.Random(0)), inputs.few))
    dataset = peer_module("datasets").Dataset.from_list(rows)
    source = {"type": "chat_template", "field_messages": "messages", "path": "json"}
    config = partial(inputs.config, chat_template="tokenizer_default", datasets=[source])

    def tokenize(_: Any) -> Any:
        strategy = module.load(inputs.tokenizer, config(), config().datasets[0])
        return wrap(strategy, dataset, process_count=None)

    text = "ChatTemplateStrategy on conversations of 4 turns"
    return Subject(text, len(rows), "rows", tokenize)


def _diff(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.prompt_strategies.chat_template")
    pairs = list(_renders(max(1, inputs.few // 100)))
    return Subject(
        f"_diff_char_span, conversations of {_MANY_TURNS} turns",
        len(pairs),
        "renders",
        lambda _: [module.ChatTemplateStrategy._diff_char_span(*pair) for pair in pairs],
    )


def _renders(conversations: int) -> Iterator[tuple[str, str]]:
    """A conversation, and the same with one turn a placeholder, for every turn."""

    def render(turns: list[str]) -> str:
        roles = ("user", "assistant")
        marked = (f"<|im_start|>{roles[n % 2]}\n{turn}<|im_end|>\n" for n, turn in enumerate(turns))
        return "".join(marked)

    rows = chat_rows(random.Random(0))
    for _ in range(conversations):
        turns = [
            turn["content"] for row in islice(rows, _MANY_TURNS // 4) for turn in row["messages"]
        ]
        for index in range(len(turns)):
            dummy = [*turns[:index], "[[dummy_message]]", *turns[index + 1 :]]
            yield render(turns), render(dummy)


def _preferences(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.utils.data.rl")
    kind = peer_module("axolotl.utils.schemas.enums").RLType.DPO
    rows = list(islice(preference_rows(random.Random(0)), inputs.few))
    dataset = peer_module("datasets").Dataset.from_list(rows)

    def keep(_: Any) -> Any:
        is_short = partial(
            module._drop_long_sequences,
            rl=kind,
            tokenizer=inputs.tokenizer,
            sequence_len=PREFERENCE_LENGTH,
        )
        return dataset.filter(is_short, load_from_cache_file=False)

    return Subject("filter by _drop_long_sequences, DPO", len(rows), "rows", keep)


def _segments(row: Row) -> Row:
    texts = row["prompt"], row["chosen"], row["rejected"]
    return {"segments": [{"label": bool(n), "text": text} for n, text in enumerate(texts)]}


def _conversations(row: Row) -> Row:
    def answered(answer: str) -> list[Row]:
        turns = ("user", row["prompt"]), ("assistant", answer)
        return [{"role": role, "content": content} for role, content in turns]

    return {
        "system": "Answer briefly.",
        "chosen": answered(row["chosen"]),
        "rejected": answered(row["rejected"]),
    }


def _answers(row: Row) -> Row:
    return {"system": "Answer briefly.", "input": row["prompt"], **row}


def _steps(row: Row) -> Row:
    return {
        "prompt": row["prompt"],
        "completions": [row["chosen"], row["rejected"]],
        "labels": [1, 0],
    }


def _instructions(row: Row) -> Row:
    return {"instruction": row["prompt"], "input": "", "output": row["chosen"]}


def _strategy(inputs: Inputs, name: str, shape: Callable[[Row], Row]) -> Subject:
    """A dataset through a strategy, loaded by its module's name."""
    module = peer_module(f"axolotl.prompt_strategies.{name}")
    wrap = peer_module("axolotl.datasets").wrap_dataset_for_tokenized_prompt
    rows = [shape(row) for row in islice(preference_rows(random.Random(0)), inputs.rows // 4)]
    dataset = peer_module("datasets").Dataset.from_list(rows)
    config = inputs.config(chat_template="tokenizer_default", reward_model=True)
    given = {"ds_cfg": inputs.config()} if name == "stepwise_supervised" else {}

    def tokenize(_: Any) -> Any:
        return wrap(module.load(inputs.tokenizer, config, **given), dataset, process_count=None)

    return Subject(f"{name}, one process", len(rows), "rows", tokenize)


def _transform(inputs: Inputs, name: str, shape: Callable[[Row], Row]) -> Subject:
    """A preference dataset through a transform, by its module and name."""
    place, _, function = name.rpartition(".")
    module = peer_module(f"axolotl.prompt_strategies.{place}")
    rl = peer_module("axolotl.utils.data.rl")
    rows = [shape(row) for row in islice(preference_rows(random.Random(0)), inputs.rows // 4)]
    dataset = peer_module("datasets").Dataset.from_list(rows)
    config = inputs.config(
        chat_template="tokenizer_default", datasets=[{"path": "json"}], dataset_num_proc=None
    )
    made = getattr(module, function)(config)
    transform, options = made if isinstance(made, tuple) else (made, {})

    def change(_: Any) -> Any:
        return rl._map_dataset(config, dataset, transform, inputs.tokenizer, **options)

    return Subject(f"_map_dataset with {name}, one process", len(rows), "rows", change)


SUBJECTS: Mapping[str, Callable[[Inputs], Subject]] = {
    "dedupe": _dedupe,
    "save": _save,
    "pack_parallel": _pack_parallel,
    "len(sampler)": _sampler,
    "process_datasets_for_packing": _packing,
    "handle_long_seq": _long,
    "get_dataset_lengths (packed)": partial(_lengths, is_packed=True),
    "get_dataset_lengths": partial(_lengths, is_packed=False),
    "V2 collator": _collate,
    "fetch and collate": _fetch,
    "encode_streaming": partial(_encode, is_apart=False),
    "encode_streaming (without the tokenizer)": partial(_encode, is_apart=True),
    "encode_packed_streaming": _encode_packed,
    "chat template": _chat,
    "_diff_char_span": _diff,
    "RL length filter": _preferences,
    "input_output": partial(_strategy, name="input_output", shape=_segments),
    "ORPO": partial(_strategy, name="orpo.chat_template", shape=_conversations),
    "reward model": partial(_strategy, name="bradley_terry.chat_template", shape=_answers),
    "stepwise_supervised": partial(_strategy, name="stepwise_supervised", shape=_steps),
    "alpaca": partial(_strategy, name="alpaca_instruct", shape=_instructions),
    "DPO transform": partial(
        _transform, name="dpo.chat_template.argilla_chat", shape=_conversations
    ),
    "ORPO transform": partial(_transform, name="orpo.chat_template.argilla", shape=_conversations),
    "DPO transform (text)": partial(_transform, name="dpo.chatml.default", shape=_answers),
}
"""Name to the function and its input."""


if __name__ == "__main__":
    main(*sys.argv[1:])
