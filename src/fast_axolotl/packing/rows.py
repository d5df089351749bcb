"""Pack token sequences into rows of one fixed length.

Sequences are taken in order. A sequence that no longer fits into the open row closes it, the rest
of the closed row is padding, and the next row opens: nothing is reordered. Lists that become lists
are packed by list operations (``lists``), everything else by kernels (``arrays``); both give the
same rows.

Sequences come as lists or tuples, numpy arrays, torch tensors, an Arrow list column, a 2-D array,
or flat: a tuple of two arrays is always ``(values, offsets)``, a list of two is two sequences. See
``sequences`` for what counts as a token.

It does not search for a tighter layout: that is ``plan_packs``. It masks no attention between the
sequences of a row; ``position_ids`` and ``cu_seqlens`` are there for kernels that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.packing import arrays, lists
from fast_axolotl.sequences import (
    DTYPES,
    OUTPUTS,
    Array,
    Flat,
    Rows,
    deliver,
    flatten,
    integer,
    lengths_of,
    option,
    plain_rows,
    read,
    require_fit,
    require_threads,
)

__all__ = ["concatenate_and_pack", "pack_sequences"]

_NAMES = ("input_ids", "labels", "attention_mask")
_TOO_LONG = ("error", "truncate", "split")


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

    Labels repeat the tokens. The rows are those of Axolotl's ``encode_streaming``, the padded last
    one included; it cuts over-long texts while it tokenizes them, here ``too_long`` decides about a
    sequence that leaves no room for its EOS and PAD: ``"error"``; ``"truncate"``, which keeps its
    first ``max_length - 2`` tokens; or ``"split"``, which gives it rows of its own, cut every
    ``max_length`` tokens, with EOS and PAD after the last piece alone (in the next row, where the
    piece leaves no room for both). Others may follow the last piece in its row.

    The result has ``input_ids``, ``labels`` and ``attention_mask``: lists of rows, or with
    ``output="numpy"`` or ``"torch"`` arrays of ``dtype`` and shape (rows, max_length); ``dtype``
    does not concern lists. On request also:

    - ``position_ids``, like the others: counted from 0 for each sequence, its EOS and PAD included,
      for each piece of a split one, and for the padding at the end of a row.
    - ``cu_seqlens``, flat and of 32 bits, as flash-attention takes it: where those counts start
      in the rows end to end, then the end. So padding is a segment of its own.
    """
    rules = _Rules(
        width=_width(max_length),
        output=output,
        too_long=too_long,
        dtype=dtype,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        num_threads=num_threads,
        separators=lists.SEPARATORS,
    )
    pad = integer("pad_token_id", pad_token_id, rules.held)
    eos = integer("eos_token_id", eos_token_id, rules.held)
    label_pad = integer("label_pad_id", label_pad_id, rules.held)
    rows = read(sequences)
    rules.check_lengths(lengths_of(rows))
    if output == "lists" and isinstance(rows, list):
        pieces = rules.cut(plain_rows(rows))
        return rules.collect(lists.pack(pieces, rules.width, pad, eos, label_pad))
    if isinstance(rows, list) and too_long == "truncate":
        rows = list(rules.cut(rows))
    flat = flatten(rows, rules.held)
    tokens = rules.cut_flat(flat)
    columns = {
        "input_ids": arrays.Column(tokens, pad, eos),
        "labels": arrays.Column(tokens, label_pad, eos),
    }
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
    """Pack sequences that already carry their labels and masks, adding nothing between them.

    Columns that disagree on a length are a ``UsageError``. A sequence longer than ``max_length`` is
    cut to it (``too_long="truncate"``), and a row of padding alone precedes it at the start and
    after a full row, as in the earlier package; or it is an error (``"error"``); or it is continued
    in the following rows (``"split"``), where its last piece may be followed by others.

    The result is that of ``pack_sequences``, ``position_ids`` and ``cu_seqlens`` included. An empty
    sequence has no place, and so no boundary.
    """
    rules = _Rules(
        width=_width(max_length),
        output=output,
        too_long=too_long,
        dtype=dtype,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        num_threads=num_threads,
        separators=0,
    )
    pad = integer("pad_token_id", pad_token_id, rules.held)
    label_pad = integer("label_pad_id", label_pad_id, rules.held)
    given = {"input_ids": input_ids, "labels": labels, "attention_masks": attention_masks}
    rows = {name: read(column, name) for name, column in given.items()}
    _require_equal_counts(rows)
    lengths = {name: lengths_of(column) for name, column in rows.items()}
    _require_equal_lengths(lengths)
    rules.check_lengths(lengths["input_ids"])
    plain = {name: column for name, column in rows.items() if isinstance(column, list)}
    if output == "lists" and len(plain) == len(rows):
        return _concatenate_lists(plain, rules, pad, label_pad)
    flat = {name: flatten(column, rules.held, name) for name, column in rows.items()}
    paddings = zip(_NAMES, flat.values(), (pad, label_pad, 0), strict=True)
    columns = {
        name: arrays.Column(rules.cut_flat(column), value) for name, column, value in paddings
    }
    return rules.fill(columns, flat)


def _concatenate_lists(
    rows: Mapping[str, Rows], rules: _Rules, pad: int, label_pad: int
) -> dict[str, Any]:
    plain = [plain_rows(column, name) for name, column in rows.items()]
    ids, labels, masks = (rules.cut(column) for column in plain)
    pieces = zip(ids, labels, masks, strict=True)
    return rules.collect(lists.concatenate(pieces, rules.width, pad, label_pad))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What both functions ask for, checked."""

    width: int
    output: str
    too_long: str
    dtype: str
    position_ids: bool
    cu_seqlens: bool
    num_threads: int
    separators: int
    """Places that each sequence needs beside its tokens."""

    def __post_init__(self) -> None:
        option("output", self.output, OUTPUTS)
        option("too_long", self.too_long, _TOO_LONG)
        option("dtype", self.dtype, DTYPES)
        require_threads(self.num_threads)

    @property
    def held(self) -> str:
        """The type in which tokens are held; that of lists is not chosen."""
        return "int64" if self.output == "lists" else self.dtype

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
        with_separators = f" and needs {needed} places with its EOS and PAD"
        raise UsageError(
            f"sequence {index} has {length} tokens{with_separators if self.separators else ''}, "
            f"but max_length is {self.width}: cut or split the sequence, which "
            'too_long="truncate" and too_long="split" do where max_length is at least '
            f"{self.separators or 1}, or raise max_length to at least {needed}"
        )

    def cut(self, rows: Rows) -> Iterable[Sequence[int]]:
        """Sequences that have room; those of ``concatenate_and_pack`` are truncated later."""
        if self.too_long == "split":
            return lists.split(rows, self.width, self.separators)
        if self.too_long == "truncate" and self.separators:
            room = self.width - self.separators
            return [row if len(row) <= room else row[:room] for row in rows]
        return rows

    def cut_flat(self, tokens: Flat) -> Flat:
        """The same, but that truncating is left to the kernels."""
        if self.too_long == "split":
            return arrays.split(tokens, self.width, self.separators)
        return tokens

    def fill(
        self, columns: Mapping[str, arrays.Column], given: Mapping[str, Flat]
    ) -> dict[str, Any]:
        """The rows, by kernels; ``given`` is what the caller passed, for messages."""
        layout = arrays.plan_rows(
            columns["input_ids"].tokens.offsets,
            self.width,
            self.limit,
            closing=self.separators > 0,
        )
        try:
            filled = arrays.fill_rows(
                layout,
                columns,
                self.held,
                self.num_threads,
                attention_mask="attention_mask" not in columns,
                position_ids=self.position_ids,
                cu_seqlens=self.cu_seqlens,
            )
        except OverflowError:
            for name, tokens in given.items():
                longest = len(tokens.values) if self.too_long == "split" else self.limit
                require_fit(tokens, self.held, name, longest)
            raise
        return {name: deliver(column, self.output) for name, column in filled.items()}

    def collect(self, packed: lists.PackedLists) -> dict[str, Any]:
        """The rows, made of lists."""
        result: dict[str, Any] = {name: getattr(packed, name) for name in _NAMES}
        if self.position_ids:
            result["position_ids"] = lists.positions(packed.starts(self.width), self.width)
        if self.cu_seqlens:
            result["cu_seqlens"] = lists.boundaries(packed.starts(self.width), self.width)
        return result


def _require_equal_counts(rows: Mapping[str, Rows | Flat]) -> None:
    count = len(rows["input_ids"])
    for name, column in rows.items():
        if len(column) != count:
            raise UsageError(
                f"input_ids has {count} sequences and {name} has {len(column)}, so index "
                f"{min(count, len(column))} has no partner: pass columns of equal length"
            )


def _require_equal_lengths(lengths: Mapping[str, Array]) -> None:
    ids = lengths["input_ids"]
    for name, others in lengths.items():
        differ = ids != others
        if differ.any():
            index = int(np.argmax(differ))
            raise UsageError(
                f"sequence {index} has {ids[index]} input_ids and {others[index]} {name}: "
                "give every token one label and one mask value"
            )


def _width(max_length: int) -> int:
    width = integer("max_length", max_length, "int64")
    if width < 1:
        raise UsageError(f"max_length must be at least 1, not {width}")
    return width
