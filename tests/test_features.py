"""Columns that Hugging Face knows more about than their type: labels, images, audio, matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fast_axolotl import Reader, open_dataset
from fast_axolotl.reading import convert
from support.files import write_parquet

pytest.importorskip("datasets")

from datasets import Array2D, Audio, ClassLabel, Dataset, Features, Image, List, Value
from datasets.table import InMemoryTable

FEATURES = Features(
    {
        "id": Value("int32"),
        "label": ClassLabel(names=["no", "yes"]),
        "image": Image(),
        "audio": Audio(sampling_rate=8000),
        "tags": List(ClassLabel(names=["x", "y", "z"])),
        "matrix": Array2D((2, 2), "float32"),
    }
)
FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def table_of(features: Features = FEATURES) -> pa.Table:
    """Twenty rows as ``datasets`` stores them; it needs packages of its own to encode audio."""
    count = range(20)
    storage = pa.array([[[1, 2], [3, i]] for i in count], pa.list_(pa.list_(pa.float32())))
    file = pa.array([{"bytes": b"\x89 %d" % i, "path": None} for i in count], FILE)
    columns = {
        "id": pa.array(count, pa.int32()),
        "label": pa.array([i % 2 for i in count]),
        "image": file,
        "audio": file,
        "tags": pa.array([[i % 3] for i in count]),
        "matrix": pa.ExtensionArray.from_storage(
            features.arrow_schema.field("matrix").type, storage
        ),
    }
    return pa.table(columns, schema=features.arrow_schema)


def features_of(reader: Reader) -> Any:
    """What ``datasets`` takes the batches for; the reader's own schema says the same."""
    table = pa.Table.from_batches(list(reader))
    found = Dataset(InMemoryTable(table)).features
    assert Features.from_arrow_schema(reader.schema) == found
    assert table.num_rows == 20
    return found


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("columns", [None, ["matrix", "label"], ["audio", "id"]])
def test_a_dataset_made_of_the_batches_has_its_features_back(
    tmp_path: Path, form: str, shuffle: int | None, columns: list[str] | None
) -> None:
    if form == "parquet":
        path = write_parquet(tmp_path / "rows.parquet", table_of(), 7)
    else:
        Dataset(InMemoryTable(table_of())).save_to_disk(path := tmp_path / "saved")
    options: dict[str, Any] = {"shuffle": shuffle, "columns": columns, "batch_size": 6}
    reader, restored = open_dataset(path, **options), open_dataset(path, **options)
    wanted = Features({name: FEATURES[name] for name in columns or FEATURES})

    assert features_of(reader) == wanted
    batches = iter(reader)
    first = convert(next(batches), "python")
    restored.load_state_dict(reader.state_dict())
    assert Features.from_arrow_schema(next(iter(restored)).schema) == wanted
    assert "audio" not in first or set(first["audio"][0]) == {"bytes", "path"}


def test_files_that_disagree_keep_the_features_they_share(tmp_path: Path) -> None:
    other = Features({**FEATURES, "label": ClassLabel(names=["yes", "no"])})
    write_parquet(tmp_path / "1.parquet", table_of().slice(0, 10))
    write_parquet(tmp_path / "2.parquet", table_of(other).slice(10).drop_columns(["image"]))

    assert features_of(open_dataset(tmp_path)) == {**FEATURES, "label": Value("int64")}


def test_without_datasets_a_matrix_is_a_list_of_lists(tmp_path: Path) -> None:
    matrix = FEATURES.arrow_schema.field("matrix").type
    path = write_parquet(tmp_path / "rows.parquet", table_of(), 7)
    pa.unregister_extension_type(matrix.extension_name)
    try:
        batches = list(open_dataset(path, batch_size=6))
    finally:
        pa.register_extension_type(matrix)
    assert convert(batches[0], "python")["matrix"][3] == [[1, 2], [3, 3]]
