"""Function by function in one process: stock's against ours, equal answers first, then by turns.

Run as ``python -m benchmarks.axolotl_functions SETTINGS.json``. Every function of Axolotl that is
replaced has an input of the size it meets in practice: 20,000 tokenized rows of 365 tokens on
average, a fifth of them repeated; ten times fewer documents, conversations and preferences. It is
looked up in its module at every call, so that it is stock's or ours as ``install()`` and
``uninstall()`` leave it. The answers of both are compared value by value and type by type, and so
are the states of the random generators afterwards. The first call of each is timed apart: it
compiles, imports and fills caches. Progress goes to stdout, the result to the file that the
settings name.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa

import fast_axolotl
from benchmarks.axolotl_inputs import PREFERENCE_LENGTH, documents, preference_rows
from benchmarks.axolotl_model import PROCESSES, chat_rows
from benchmarks.axolotl_runs import OURS, STOCK, by_turns, prepared_difference
from benchmarks.race import peer_module
from benchmarks.workloads import draw_lengths, token_rows
from fast_axolotl.cli.race import one_line

PROGRESS = "progress: "
"""How a line begins that is meant for people."""
_LEAST_SECONDS = 0.2
_MOST_PASSES = 20
_ARMS: Mapping[str, Callable[[], bool]] = {
    STOCK: fast_axolotl.uninstall,
    OURS: fast_axolotl.install,
}


def main(path: str) -> None:
    """Measures what the settings ask for."""
    settings = json.loads(Path(path).read_text())
    logging.disable(logging.WARNING)
    datasets = peer_module("datasets")
    datasets.disable_caching()
    datasets.disable_progress_bars()
    # Workers that are spawned import the main module: let it be that of ``axolotl preprocess``.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("axolotl.cli.main")
    fast_axolotl.uninstall()
    inputs = Inputs(settings["rows"], Path(settings["model"]), Path(settings["folder"]))
    found = []
    for name in settings["names"]:
        print(f"{PROGRESS}{name}", flush=True)
        try:
            result = _measure(SUBJECTS[name](inputs), settings["repeats"])
        except Exception as error:  # noqa: BLE001 - another Axolotl may fail in any way; it is told
            result = {"error": one_line(error)}
        found.append({"name": name, **result})
        Path(settings["result"]).write_text(json.dumps(found))


def _measure(subject: Subject, repeats: int) -> dict[str, Any]:
    answers, first = {}, {}
    before = _calls()
    for arm in (STOCK, OURS):
        _ARMS[arm]()
        answers[arm], first[arm] = _call(subject)
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
        seconds[arm].append(_repeat(subject))
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


def _call(subject: Subject) -> tuple[Any, float]:
    """The answer with the states of the generators after it, and how long it took."""
    _seed()
    given = subject.prepare()
    start = time.perf_counter()
    answer = subject.call(given)
    taken = time.perf_counter() - start
    states = _states()
    return {"answer": subject.look(given, answer), "generators": states}, taken


def _pass(subject: Subject) -> float:
    _seed()
    given = subject.prepare()
    start = time.perf_counter()
    answer = subject.call(given)
    taken = time.perf_counter() - start
    del answer
    if isinstance(given, Stopwatch):
        taken -= given.seconds
    if isinstance(given, Path):
        shutil.rmtree(given)
    return taken


def _repeat(subject: Subject) -> float:
    # Not before every pass: with all of Axolotl in the process it takes longer than most of them.
    gc.collect()
    passes = [_pass(subject)]
    while sum(passes) < _LEAST_SECONDS and len(passes) < _MOST_PASSES:
        passes.append(_pass(subject))
    return median(passes)


def _seed() -> None:
    random.seed(7)
    peer_module("numpy").random.seed(7)
    peer_module("torch").manual_seed(7)


def _states() -> list[str]:
    numpy, torch = peer_module("numpy"), peer_module("torch")
    return [
        repr(random.getstate()),
        repr([numpy.asarray(part).tolist() for part in numpy.random.get_state()]),
        repr(torch.get_rng_state().tolist()),
    ]


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
    if isinstance(stock, Mapping):
        if list(stock) != list(ours):
            return f"{place}: {list(ours)} in place of {list(stock)}"
        return _first(answer_difference(stock[key], ours[key], f"{place} {key}") for key in stock)
    if isinstance(stock, list | tuple):
        return _sequence_difference(stock, ours, place)
    return None if stock == ours else f"{place}: {ours!r} in place of {stock!r}"[:200]


def _sequence_difference(stock: Any, ours: Any, place: str) -> str | None:
    if len(stock) != len(ours):
        return f"{place}: {len(ours):,} items in place of {len(stock):,}"
    kinds, found = ({type(item) for item in items} for items in (stock, ours))
    if kinds != found:
        return f"{place}: items of {found} in place of {kinds}"
    if kinds <= {int, str, float, bool}:
        return None if stock == ours else f"{place}: other values"
    pairs = enumerate(zip(stock, ours, strict=True))
    return _first(answer_difference(*pair, f"{place}[{index}]") for index, pair in pairs)


def _dataset_difference(stock: Any, ours: Any, place: str) -> str | None:
    if stock.features != ours.features or stock.column_names != ours.column_names:
        return f"{place}: {ours.features} in place of {stock.features}"[:200]
    if len(stock) != len(ours):
        return f"{place}: {len(ours):,} rows in place of {len(stock):,}"
    theirs, found = (data.with_format("arrow")[:] for data in (stock, ours))
    other = [name for name in theirs.column_names if not found[name].equals(theirs[name])]
    return f"{place}: other values in {', '.join(other)}" if other else None


def _first(reasons: Any) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


# The functions and their inputs.

_LENGTH = 4096
_BIN_SIZE = 200
_GROUP_SIZE = 100_000
"""Axolotl's defaults."""
_PACKS = 16
_DOCUMENT_BYTES = 2000
_MANY_TURNS = 20
_ROWS = "lognormal, mean 365"


def _itself(_: Any, answer: Any) -> Any:
    return answer


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A function and its input."""

    text: str
    rows: int
    unit: str
    call: Callable[[Any], Any]
    """One pass, timed; takes what ``prepare`` gave."""
    prepare: Callable[[], Any] = _nothing
    """What every pass needs anew: objects that a pass uses up, a folder to write to."""
    look: Callable[[Any, Any], Any] = _itself
    """From what was prepared and the answer, what has to be equal."""


class Inputs:
    """What the subjects share, made when it is first asked for."""

    def __init__(self, rows: int, model: Path, folder: Path) -> None:
        self.rows = rows
        self.few = max(1, rows // 10)
        self.folder = folder
        self._model = model
        self._numbers = count()

    def new_folder(self) -> Path:
        return self.folder / f"saved-{next(self._numbers)}"

    @cached_property
    def config(self) -> Any:
        """As ``axolotl preprocess`` has it."""
        return peer_module("axolotl.utils.dict").DictDefault(
            {
                "dataset_num_proc": PROCESSES,
                "is_preprocess": True,
                "min_sample_len": 2,
                "sample_packing": True,
                "sequence_len": _LENGTH,
                "train_on_inputs": False,
                "pretraining_dataset": [
                    {"path": "json", "type": "pretrain", "text_column": "text"}
                ],
            }
        )

    @cached_property
    def tokenizer(self) -> Any:
        return peer_module("transformers").AutoTokenizer.from_pretrained(str(self._model))

    @cached_property
    def dataset(self) -> Any:
        """Tokenized rows in a mapped file, as they come out of tokenisation."""
        return self._mapped("rows", token_rows(self.rows))

    @cached_property
    def packed(self) -> Any:
        """The same with the columns for packing."""
        with_columns = peer_module("axolotl.utils.trainer").process_datasets_for_packing
        return with_columns(self.config, self.dataset, None)[0]

    @cached_property
    def texts(self) -> list[str]:
        return list(documents(self.few, _DOCUMENT_BYTES))

    def _mapped(self, name: str, table: pa.Table) -> Any:
        path = self.folder / f"{name}.arrow"
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        return peer_module("datasets").Dataset.from_file(str(path))


def _dedupe(inputs: Inputs) -> Subject:
    module, dataset = peer_module("axolotl.utils.data.utils"), inputs.packed
    return Subject(
        text="_deduplicate_dataset",
        rows=len(dataset),
        unit="rows",
        call=lambda _: module._deduplicate_dataset(dataset)[0],
    )


def _save(inputs: Inputs) -> Subject:
    """The workers that stock spawns import what its main module does: this file."""
    module, dataset = peer_module("axolotl.utils.data.shared"), inputs.packed

    def save(folder: Path) -> Path:
        config = inputs.config | {"dataset_prepared_path": str(folder)}
        module.save_preprocessed_dataset(type(inputs.config)(config), dataset, "hash", "train")
        return folder

    return Subject(
        text="save_preprocessed_dataset",
        rows=len(dataset),
        unit="rows",
        prepare=inputs.new_folder,
        call=save,
    )


def _long(inputs: Inputs) -> Subject:
    module, dataset = peer_module("axolotl.utils.data.utils"), inputs.dataset
    return Subject(
        text=f"handle_long_seq_in_dataset, {_LENGTH // 4} tokens",
        rows=len(dataset),
        unit="rows",
        call=lambda _: module.handle_long_seq_in_dataset(dataset, _LENGTH // 4, inputs.config),
    )


def _packing(inputs: Inputs) -> Subject:
    module, dataset = peer_module("axolotl.utils.trainer"), inputs.dataset
    return Subject(
        text="process_datasets_for_packing",
        rows=len(dataset),
        unit="rows",
        call=lambda _: module.process_datasets_for_packing(inputs.config, dataset, None)[0],
    )


def _lengths(inputs: Inputs, *, is_packed: bool) -> Subject:
    module = peer_module("axolotl.utils.samplers.utils")
    dataset = inputs.packed if is_packed else inputs.dataset
    return Subject(
        text=f"get_dataset_lengths, {'with' if is_packed else 'without'} a length column",
        rows=len(dataset),
        unit="rows",
        call=lambda _: module.get_dataset_lengths(dataset),
    )


def _pack_parallel(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.utils.samplers.multipack")
    lengths = draw_lengths(_ROWS, 5 * inputs.rows).astype("int32")
    options = {"bin_capacity": _LENGTH, "group_size": _GROUP_SIZE, "bin_size": _BIN_SIZE}
    return Subject(
        text=f"pack_parallel, {PROCESSES} processes",
        rows=len(lengths),
        unit="lengths",
        call=lambda _: module.pack_parallel(lengths, **options, num_processes=PROCESSES),
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
        text=f"len(MultipackBatchSampler), {PROCESSES} processes",
        rows=len(lengths),
        unit="lengths",
        prepare=prepare,
        call=len,
        look=lambda sampler, answer: [answer, sampler.efficiency(), list(sampler)],
    )


def _packs(inputs: Inputs) -> list[list[int]]:
    """Rows of the dataset that fill packs."""
    lengths = inputs.packed["length"]
    packs: list[list[int]] = [[]]
    room = _LENGTH
    for index, length in enumerate(lengths):
        if length > room:
            if len(packs) == _PACKS:
                break
            packs.append([])
            room = _LENGTH
        packs[-1].append(index)
        room -= length
    return packs


def _collator(inputs: Inputs) -> Any:
    return peer_module("axolotl.utils.collators").V2BatchSamplerDataCollatorForSeq2Seq(
        inputs.tokenizer, padding=True, pad_to_multiple_of=_LENGTH, return_tensors="pt"
    )


def _collate(inputs: Inputs) -> Subject:
    dataset = inputs.packed.remove_columns("length")
    packs = [[dataset[index] for index in pack] for pack in _packs(inputs)]
    collator = _collator(inputs)
    return Subject(
        text=f"V2BatchSamplerDataCollatorForSeq2Seq, packs of {_LENGTH}, from lists",
        rows=len(packs),
        unit="packs",
        call=lambda _: [collator([pack]) for pack in packs],
    )


def _fetch(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.monkeypatch.data.batch_dataset_fetcher")
    dataset, packs = inputs.packed.remove_columns("length"), _packs(inputs)
    collator = _collator(inputs)
    return Subject(
        text=f"_MapDatasetFetcher.fetch with the V2 collator, packs of {_LENGTH}",
        rows=len(packs),
        unit="packs",
        prepare=lambda: module._MapDatasetFetcher(dataset, True, collator, True),
        call=lambda fetcher: [fetcher.fetch([pack]) for pack in packs],
    )


def _encode(inputs: Inputs, *, is_apart: bool = False) -> Subject:
    module, texts, tokenizer = _streaming(), inputs.texts, inputs.tokenizer
    length = _LENGTH // 2

    def call(watch: Stopwatch | None) -> Any:
        with watch or nullcontext():
            return module.encode_streaming({"text": texts}, tokenizer, length)

    return Subject(
        text="encode_streaming" + (", without the tokenizer's own time" if is_apart else ""),
        rows=len(texts),
        unit="documents",
        prepare=partial(Stopwatch, type(tokenizer)) if is_apart else _nothing,
        call=call,
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


def _encode_packed(inputs: Inputs) -> Subject:
    module, texts, tokenizer = _streaming(), inputs.texts, inputs.tokenizer
    length = _LENGTH // 2
    wrap = partial(
        peer_module("axolotl.utils.data.wrappers").get_dataset_wrapper,
        dataset_config=inputs.config.pretraining_dataset[0],
        tokenizer=tokenizer,
        cfg=type(inputs.config)(inputs.config | {"sequence_len": length, "dataset_num_proc": None}),
        dataset_base_type="pretrain",
    )
    collator = peer_module("axolotl.utils.collators").PretrainingBatchSamplerDataCollatorForSeq2Seq(
        tokenizer, return_tensors="pt", padding=True, pad_to_multiple_of=length, multipack_attn=True
    )
    return Subject(
        text="encode_packed_streaming",
        rows=len(texts),
        unit="documents",
        call=lambda _: module.encode_packed_streaming(
            collator,
            wrap,
            {"text": texts},
            bin_size=_BIN_SIZE,
            max_seq_length=length,
            batch_size=1,
            multipack_attn=True,
        ),
    )


def _streaming() -> Any:
    return peer_module("axolotl.utils.data.streaming")


def _chat(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.prompt_strategies.chat_template")
    wrap = peer_module("axolotl.datasets").wrap_dataset_for_tokenized_prompt
    dictionary = type(inputs.config)
    rows = list(islice(chat_rows(random.Random(0)), inputs.few))
    dataset = peer_module("datasets").Dataset.from_list(rows)
    source = {"type": "chat_template", "field_messages": "messages", "path": "json"}
    settings = inputs.config | {"chat_template": "tokenizer_default", "datasets": [source]}

    def tokenize(_: Any) -> Any:
        strategy = module.load(inputs.tokenizer, dictionary(settings), dictionary(source))
        return wrap(strategy, dataset, process_count=None)

    return Subject(
        text="ChatTemplateStrategy on conversations of 4 turns",
        rows=len(rows),
        unit="rows",
        call=tokenize,
    )


def _diff(inputs: Inputs) -> Subject:
    module = peer_module("axolotl.prompt_strategies.chat_template")
    pairs = list(_renders(max(1, inputs.few // 100)))
    return Subject(
        text=f"_diff_char_span, conversations of {_MANY_TURNS} turns",
        rows=len(pairs),
        unit="renders",
        call=lambda _: [module.ChatTemplateStrategy._diff_char_span(*pair) for pair in pairs],
    )


def _renders(conversations: int) -> Iterator[tuple[str, str]]:
    """A conversation, and the same with one turn a placeholder, for every turn."""
    rows = chat_rows(random.Random(0))
    for _ in range(conversations):
        turns = [
            turn["content"] for row in islice(rows, _MANY_TURNS // 4) for turn in row["messages"]
        ]
        for index in range(len(turns)):
            dummy = [*turns[:index], "[[dummy_message]]", *turns[index + 1 :]]
            yield _render(turns), _render(dummy)


def _render(turns: list[str]) -> str:
    roles = ("user", "assistant")
    marked = (f"<|im_start|>{roles[n % 2]}\n{turn}<|im_end|>\n" for n, turn in enumerate(turns))
    return "".join(marked)


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

    return Subject(
        text="filter by _drop_long_sequences, DPO", rows=len(rows), unit="rows", call=keep
    )


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
    "encode_streaming": _encode,
    "encode_streaming (without the tokenizer)": partial(_encode, is_apart=True),
    "encode_packed_streaming": _encode_packed,
    "chat template": _chat,
    "_diff_char_span": _diff,
    "RL length filter": _preferences,
}
"""Name to the function and its input."""


if __name__ == "__main__":
    main(*sys.argv[1:])
