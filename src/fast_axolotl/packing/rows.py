"""Pack token sequences into rows of one fixed length.

Sequences are taken in order. A sequence that no longer fits into the open row closes it, the rest
of the closed row is padding, and the next row opens: nothing is reordered. Lists that become lists
are packed by list operations (``lists``), everything else, and the optional columns, by kernels, on
every processor; both give the same rows. The kernels first plan: one pass over the lengths gives
the place where each sequence starts. Then every column is filled from it, a block of sequences at a
time. The columns are the only large allocation; the plan takes eight bytes a sequence.

Sequences come as lists or tuples, numpy arrays, torch tensors, an Arrow list column, a 2-D array,
or flat: a tuple of two arrays is always ``(values, offsets)``, a list of two is two sequences. See
``sequences`` for what counts as a token.

It does not search for a tighter layout: that is ``plan_packs``. It masks no attention between the
sequences of a row; ``position_ids`` and ``cu_seqlens`` are there for kernels that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.packing import lists
from fast_axolotl.packing.sequences import (
    Array,
    Flat,
    check_options,
    deliver,
    flatten,
    integer,
    lengths_of,
    plain_rows,
    read,
    require_fit,
)

_NAMES = ("input_ids", "labels", "attention_mask")


def pack_sequences(
    sequences: Iterable[Any],
    max_length: int,
    pad_token_id: int,
    eos_token_id: int,
    label_pad_id: int = -100,
    *,
    output: str = "lists",
    too_long: str = "error",
    dtype: str = "int64",
    position_ids: bool = False,
    cu_seqlens: bool = False,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Pack sequences, each followed by one EOS (a label, attended) and one PAD (neither).

    Labels equal the tokens. The rows equal those of Axolotl's ``encode_streaming``, including the
    padded last one. ``too_long`` decides about a sequence that leaves no room for its EOS and PAD:
    ``"error"`` raises; ``"truncate"`` keeps its first ``max_length - 2`` tokens; ``"split"`` starts
    a new row and cuts it every ``max_length`` tokens, with EOS and PAD only after the last piece
    (in the next row if there is no room for both). Other sequences may follow the last piece.

    The result has ``input_ids``, ``labels`` and ``attention_mask``: lists of rows, or with
    ``output="numpy"`` or ``"torch"`` arrays of ``dtype`` and shape (rows, max_length). Lists ignore
    ``dtype``. Optional columns:

    - ``position_ids``, like the others: counted from 0 for each sequence, its EOS and PAD included,
      for each piece of a split one, and for the padding at the end of a row.
    - ``cu_seqlens``, flat and of 32 bits, as flash-attention takes it: where those counts start
      in the concatenated rows, then the end. Padding is a separate segment.
    """
    rules = _Rules(
        width=integer("max_length", max_length, least=1),
        separators=lists.SEPARATORS,
        output=output,
        too_long=too_long,
        dtype=dtype,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        num_threads=num_threads,
    )
    pad = integer("pad_token_id", pad_token_id, dtype=rules.held)
    eos = integer("eos_token_id", eos_token_id, dtype=rules.held)
    label_pad = integer("label_pad_id", label_pad_id, dtype=rules.held)
    rows = read(sequences)
    rules.check_lengths(lengths_of(rows))
    if isinstance(rows, list) and too_long == "truncate":
        rows = [row if len(row) <= rules.limit else row[: rules.limit] for row in rows]
    if isinstance(rows, list) and rules.stays_lists:
        packed = lists.pack(plain_rows(rows), rules.width, pad, eos, label_pad)
        return dict(zip(_NAMES, packed, strict=True))
    flat = flatten(rows, rules.held)
    tokens = rules.cut(flat)
    columns = {"input_ids": (tokens, pad, eos), "labels": (tokens, label_pad, eos)}
    return rules.fill(columns, {"sequences": flat})


def concatenate_and_pack(
    input_ids: Iterable[Any],
    labels: Iterable[Any],
    attention_masks: Iterable[Any],
    max_length: int,
    pad_token_id: int,
    label_pad_id: int = -100,
    *,
    output: str = "lists",
    too_long: str = "truncate",
    dtype: str = "int64",
    position_ids: bool = False,
    cu_seqlens: bool = False,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Pack sequences that already have labels and masks, without separators between them.

    Columns that disagree on a length are a ``UsageError``. A sequence longer than ``max_length`` is
    cut to it (``too_long="truncate"``), and a row of padding alone precedes it at the start and
    after a full row, as in the earlier package; or it is an error (``"error"``); or it is continued
    in the following rows (``"split"``), where its last piece may be followed by others.

    The result is that of ``pack_sequences``, ``position_ids`` and ``cu_seqlens`` included. An empty
    sequence has no place, and so no boundary.
    """
    rules = _Rules(
        width=integer("max_length", max_length, least=1),
        separators=0,
        output=output,
        too_long=too_long,
        dtype=dtype,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        num_threads=num_threads,
    )
    pad = integer("pad_token_id", pad_token_id, dtype=rules.held)
    label_pad = integer("label_pad_id", label_pad_id, dtype=rules.held)
    passed = {"input_ids": input_ids, "labels": labels, "attention_masks": attention_masks}
    rows = {name: read(column, name) for name, column in passed.items()}
    count = len(rows["input_ids"])
    for name, column in rows.items():
        if len(column) != count:
            raise UsageError(
                f"input_ids has {count} sequences and {name} has {len(column)}; pass columns of "
                "equal length"
            )
    lengths = lengths_of(rows["input_ids"])
    for name, column in rows.items():
        others = lengths_of(column)
        differ = lengths != others
        if differ.any():
            index = int(np.argmax(differ))
            raise UsageError(
                f"sequence {index} has {lengths[index]} input_ids and {others[index]} {name}; "
                "pass one label and one mask value per token"
            )
    rules.check_lengths(lengths)
    plain = {name: column for name, column in rows.items() if isinstance(column, list)}
    if rules.stays_lists and len(plain) == len(rows):
        pieces = [plain_rows(column, name) for name, column in plain.items()]
        packed = lists.concatenate(zip(*pieces, strict=True), rules.width, pad, label_pad)
        return dict(zip(_NAMES, packed, strict=True))
    flat = {name: flatten(column, rules.held, name) for name, column in rows.items()}
    paddings = zip(_NAMES, flat.values(), (pad, label_pad, 0), strict=True)
    columns = {name: (rules.cut(column), value, 0) for name, column, value in paddings}
    return rules.fill(columns, flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What both functions ask for, checked."""

    width: int
    separators: int
    """Places that each sequence needs beside its tokens."""
    output: str
    too_long: str
    dtype: str
    position_ids: bool
    cu_seqlens: bool
    num_threads: int

    def __post_init__(self) -> None:
        ways = ("error", "truncate", "split")
        check_options(self.output, self.too_long, ways, self.dtype, self.num_threads)

    @property
    def held(self) -> str:
        """The type in which tokens are held; that of lists is not chosen."""
        return "int64" if self.output == "lists" else self.dtype

    @property
    def stays_lists(self) -> bool:
        """Whether lists are packed by list operations."""
        is_plain = self.too_long != "split" and not (self.position_ids or self.cu_seqlens)
        return self.output == "lists" and is_plain

    @property
    def limit(self) -> int:
        """The most tokens of one piece."""
        return self.width if self.too_long == "split" else max(0, self.width - self.separators)

    def check_lengths(self, lengths: Array) -> None:
        """Raises where a sequence has no room, and is not to be cut, or cannot be."""
        room = self.width - self.separators
        can_cut = self.too_long != "error" and room >= 0
        if can_cut or not len(lengths) or lengths.max() <= room:
            return
        index = int(np.argmax(lengths > room))
        length = int(lengths[index])
        needed = length + self.separators
        with_separators = f", {needed} with EOS and PAD"
        raise UsageError(
            f"sequence {index} has {length} tokens{with_separators if self.separators else ''}, "
            f"but max_length is {self.width}; raise max_length to at least {needed}, or pass "
            'too_long="truncate" or too_long="split", which need a max_length of at least '
            f"{self.separators or 1}"
        )

    def cut(self, tokens: Flat) -> Flat:
        """The sequences, those to split in pieces of a row, which only adds offsets.

        The last piece is what is left. Where that has no room for its separators, an empty piece
        comes after it, which has. The kernels truncate.
        """
        if self.too_long != "split":
            return tokens
        lengths = lengths_of(tokens)
        is_long = lengths + self.separators > self.width
        if not is_long.any():
            return tokens
        pieces = np.where(is_long, -(-lengths // self.width), 1)
        rest = lengths - (pieces - 1) * self.width
        pieces += is_long & (rest + self.separators > self.width)
        first = np.cumsum(pieces) - pieces
        nth = np.arange(pieces.sum()) - np.repeat(first, pieces)
        cuts = np.repeat(tokens.offsets[:-1], pieces) + nth * self.width
        cuts = np.minimum(cuts, np.repeat(tokens.offsets[1:], pieces))
        return Flat(tokens.values, np.append(cuts, tokens.offsets[-1]))

    def fill(
        self, columns: Mapping[str, tuple[Flat, int, int]], flat: Mapping[str, Flat]
    ) -> dict[str, Any]:
        """The rows, by kernels, from the tokens, padding and EOS of each column.

        ``flat`` is what the caller passed, for messages.
        """
        from fast_axolotl.kernels import fill

        offsets, is_closing = columns["input_ids"][0].offsets, self.separators > 0
        targets = np.empty(len(offsets), np.int64)
        num_places = fill.place(offsets, self.limit, self.width, is_closing, targets)
        layout = fill.Layout(offsets, targets, self.limit, self.width, is_closing)
        filled: dict[str, Array] = {}
        fillers: list[Callable[[int, int], Any]] = []

        def add(name: str, kernel: Callable[..., Any], *arguments: Any) -> None:
            out = np.empty(num_places, self.held)
            filled[name] = out.reshape(-1, self.width)
            fillers.append(partial(kernel, *arguments, out))

        most = np.iinfo(np.int32).max
        if self.cu_seqlens and num_places > most:
            raise UsageError(
                f"cu_seqlens would reach {num_places}, which does not fit in 32 bits (at most "
                f"{most}); pack fewer sequences at a time"
            )
        for name, (tokens, padding, eos) in columns.items():
            own = layout._replace(offsets=tokens.offsets)
            add(name, fill.lay, tokens.values, *own, eos, padding)
        if "attention_mask" not in columns:
            add("attention_mask", fill.mark, *layout)
        if self.position_ids or self.cu_seqlens:
            add("position_ids", fill.positions, *layout)
        try:
            fill.fill(fillers, layout, self.num_threads)
        except OverflowError:
            for name, tokens in flat.items():
                longest = len(tokens.values) if self.too_long == "split" else self.limit
                require_fit(tokens, self.held, name, longest)
            raise
        if self.cu_seqlens:
            starts = np.flatnonzero(filled["position_ids"] == 0)
            filled["cu_seqlens"] = np.append(starts, num_places).astype(np.int32)
        if not self.position_ids:
            filled.pop("position_ids", None)
        return {name: deliver(column, self.output) for name, column in filled.items()}
