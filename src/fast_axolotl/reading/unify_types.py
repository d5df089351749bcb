"""Give all batches one schema.

``first_schema`` joins the schemas that files declare and infers the rest, alike on every shard:
from all of the data where the caller asks for it, else from the first rows of up to 16 files. What
a scan has found is kept, and spares the next one. From then on types only grow: a column or a field
may come late, what was only null gets its type, and anything else is an error with file, line and
cure.

Workers decode a block under whatever schema was known when they began; the consumer joins and casts
in row order, so the types of a batch depend on the rows before it and never on the
timing of threads. Where the joined type needs the original text (a mixed array, a CSV
number that turned out to be text), the block is decoded once more under the joined schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import UsageError
from fast_axolotl.reading.blocks import (
    Block,
    Dataset,
    Decoded,
    ReadOptions,
    decode_or_reject,
    value_bytes,
)
from fast_axolotl.reading.index import scanned_schema
from fast_axolotl.reading.prefetch import Prefetcher
from fast_axolotl.reading.schema import MIXED, TypeClash, conform, is_number, join_schemas

_SAMPLE_BYTES = 64 * 1024
_SAMPLE_SHARE = 16_384
_SAMPLED_FILES = 16
"""Types are inferred from so many bytes, or this part of all, spread over so many files at most.

Every one of perhaps 1,024 shards reads them, before anything else.
"""

_COLUMN_BYTES = 1024
"""What an array takes beside its values, which counts where columns are thousands."""


@dataclass(slots=True)
class Known:
    """The schema so far, shared with the decode threads as their hint."""

    schema: pa.Schema

    def decode(self, block: Block, options: ReadOptions) -> tuple[Decoded, int]:
        """A block's rows and what they take in memory; runs on a decode thread."""
        decoded = decode_or_reject(block, self.schema, options)
        # What is left of a block that comes in parts is held too, encoded.
        size = value_bytes(decoded.table) + (block.weight if decoded.more else 0)
        return decoded, size + decoded.table.num_columns * _COLUMN_BYTES

    def widen(self, decoded: Decoded, block: Block, options: ReadOptions) -> Decoded:
        """The same rows under the schema that they and all rows before them share."""
        if decoded.table.schema.equals(self.schema, check_metadata=True):
            return decoded
        settled = None if options.may_widen else self.schema
        join = partial(join_schemas, text_wins=block.text_wins, settled=settled)
        wanted = self.schema
        try:
            if decoded.table.num_columns:
                wanted = join(wanted, decoded.table.schema)
            found = decoded.table.schema
            # Where the joined type holds the text of the values, a cast would not do.
            types = [(wanted.field(field.name).type, field.type) for field in found]
            fits = not any(
                kind != MIXED if joined == MIXED else pa.types.is_string(joined) and is_number(kind)
                for joined, kind in types
            )
        except TypeClash:
            fits = False
        if block.is_text and not fits:
            # Under what is known now it gives the text, or the error with its line.
            decoded = decode_or_reject(block, wanted, options)
        if decoded.table.num_columns == 0 and decoded.table.num_rows == 0:
            return replace(decoded, table=self.schema.empty_table())
        self.schema = join(wanted, decoded.table.schema, source="")
        return replace(decoded, table=conform(decoded.table, self.schema))

    def widen_all(self, decoded: Decoded, block: Block, options: ReadOptions) -> Iterator[Decoded]:
        """The rows of a block, part by part where it does not fit into memory at once."""
        decoded = self.widen(decoded, block, options)
        yield decoded
        for part in decoded.more:
            yield from self.widen_all(self.decode(part, options)[0], part, options)


def first_schema(dataset: Dataset, *, scan: bool, num_threads: int, budget: int) -> pa.Schema:
    """Declared schemas joined; the rest inferred from a sample, or from everything."""
    schema = pa.schema([])
    # What folders tell, which takes the place of columns of these names.
    keys = {name: value.type for file in dataset.files for name, value in file.source.keys}
    for file in dataset.files:
        if file.schema is not None:
            own = [field for field in file.schema if field.name not in keys]
            found = pa.schema(own, file.schema.metadata)
            schema = join_schemas(schema, found, source=file.source.path)
    undeclared = [index for index, file in enumerate(dataset.files) if file.schema is None]
    if undeclared:
        dataset = dataset.with_options(may_widen=True)
    options = dataset.options

    def scanned() -> pa.Schema:
        known = Known(schema)
        blocks = ((block,) for block in _blocks(dataset, undeclared))
        decode = partial(known.decode, options=options)
        with closing(Prefetcher(blocks, decode, num_threads=num_threads, budget=budget)) as ahead:
            for (block,), decoded in ahead:
                for _ in known.widen_all(decoded, block, options):
                    pass
        return known.schema

    if undeclared and scan:
        schema = scanned_schema(dataset, scanned)
    elif undeclared:
        schema = _sampled(dataset, undeclared, schema)
    schema = join_schemas(schema, pa.schema(keys))
    if all(file.format == "csv" for file in dataset.files):
        # CSV columns without any value are empty text, not null.
        kinds = [pa.string() if pa.types.is_null(field.type) else field.type for field in schema]
        schema = pa.schema(dict(zip(schema.names, kinds, strict=True)))
    fields = {field.name: field for field in schema}
    columns = options.columns or fields
    if missing := [name for name in columns if name not in fields]:
        names = [name for file in dataset.files for name in getattr(file, "names", ())]
        names += _sampled(dataset.with_options(columns=None), undeclared, pa.schema(keys)).names
        hint = ' (infer="scan" also finds columns of later rows)' if undeclared else ""
        raise UsageError(
            f"there is no column {missing[0]!r}; the data has: {', '.join(dict.fromkeys(names))}"
            f"{hint}"
        )
    return pa.schema([fields[name] for name in columns], schema.metadata)


def _blocks(dataset: Dataset, files: Sequence[int]) -> Iterator[Block]:
    for file in files:
        for unit in dataset.files[file].units(file):
            yield from dataset.blocks(unit)


def _sampled(dataset: Dataset, files: Sequence[int], schema: pa.Schema) -> pa.Schema:
    """The types of the first lines of some files; else of the first rows that there are."""
    known, options = Known(schema), dataset.options

    def look(block: Block) -> bool:
        decoded = decode_or_reject(block, known.schema, options)
        return bool(known.widen(decoded, block, options).table.num_rows)

    opened: list[Any] = [dataset.files[file] for file in files]
    sampled = [file for file in opened if hasattr(file, "sample")]
    sampled = sampled[:: -(-len(sampled) // _SAMPLED_FILES) or 1]
    num_bytes = sum(file.source.num_bytes for file in dataset.files)
    size = max(_SAMPLE_BYTES, num_bytes // _SAMPLE_SHARE) // max(1, len(sampled))
    heads = [look(replace(file.sample(size), keys=file.source.keys)) for file in sampled]
    if not any(heads):
        any(map(look, _blocks(dataset.with_options(block_bytes=_SAMPLE_BYTES), files)))
    return known.schema
