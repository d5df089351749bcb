"""Folders: Hugging Face's two kinds, globs, lists, and what is left aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl import detect_format, open_dataset
from fast_axolotl.errors import UsageError
from support.files import (
    Rows,
    compress,
    make_rows,
    read_rows,
    write_csv,
    write_jsonl,
    write_parquet,
)


def ids_of(path: Any, **options: Any) -> list[int]:
    return [row["id"] for row in read_rows(path, **options)]


# save_to_disk


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("datasets")


def test_a_saved_dataset_reads_in_the_order_of_its_index(hf: Any, tmp_path: Path) -> None:
    rows = make_rows(1200)
    folder = tmp_path / "saved"
    hf.Dataset.from_list(rows).save_to_disk(folder, num_shards=12)

    assert detect_format(str(folder)) == ("hf_dataset", None)
    assert read_rows(folder) == rows
    assert read_rows(folder, format="hf_dataset") == rows
    assert read_rows(str(folder), columns=["id"]) == [{"id": index} for index in range(1200)]


# Folders as on the Hub


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    rows = make_rows(40)
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", rows[:10])
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", rows[10:30])
    (folder / "README.md").write_text("# A dataset\n")
    (folder / "LICENSE").write_text("MIT\n")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / ".cache").mkdir()
    write_jsonl(folder / ".cache" / "left.jsonl", rows[:1])
    return folder


def test_a_hub_folder_reads_in_order_and_leaves_other_files_aside(hub: Path) -> None:
    reader = open_dataset(hub)

    assert [row["id"] for batch in reader for row in batch.to_pylist()] == list(range(30))
    ignored = {Path(name).name for name in reader.stats.ignored_files}
    assert {"README.md", "LICENSE", ".gitattributes", "dataset_infos.json"} <= ignored


@pytest.mark.parametrize("kind", ["saved", "hub"])
def test_one_of_several_splits_must_be_named(hf: Any, tmp_path: Path, hub: Path, kind: str) -> None:
    rows, folder = make_rows(40), hub
    write_parquet(hub / "data" / "test-00000-of-00001.parquet", rows[30:])
    if kind == "saved":
        folder = tmp_path / "saved"
        parts = {"train": hf.Dataset.from_list(rows[:30]), "test": hf.Dataset.from_list(rows[30:])}
        hf.DatasetDict(parts).save_to_disk(folder)
        assert detect_format(str(folder)) == ("hf_dataset", None)
        assert read_rows(folder / "test") == rows[30:]

    names = "test, train" if kind == "hub" else "train, test"
    with pytest.raises(UsageError, match=f'{names}; pass split="'):
        open_dataset(folder)
    assert read_rows(folder, split="train") == rows[:30]
    assert read_rows(folder, split="test") == rows[30:]
    assert sorted(ids_of(folder, split="all")) == list(range(40))
    with pytest.raises(UsageError, match=f"no split 'validation'; it has: {names}"):
        open_dataset(folder, split="validation")


def test_a_split_goes_by_any_of_its_names_and_a_folder_above_says_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "train"
    folder.mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", make_rows(3))
    assert ids_of(folder) == [0, 1, 2]
    write_jsonl(folder / "train.jsonl", make_rows(3))
    write_jsonl(folder / "dev.jsonl", make_rows(5)[3:])

    assert ids_of(folder, split="validation") == ids_of(folder, split="val") == [3, 4]


# Folders, globs, lists


def test_a_folder_may_mix_formats(tmp_path: Path) -> None:
    rows: Rows = [{"id": index, "text": str(index) + "x"} for index in range(9)]
    write_parquet(tmp_path / "1.parquet", rows[:2])
    compress(write_jsonl(tmp_path / "2.jsonl", rows[2:4]), "gzip")
    (tmp_path / "2.jsonl").unlink()
    write_csv(tmp_path / "3.csv", rows[4:6])
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "4.json").write_text(json.dumps(rows[6:]))

    assert read_rows(tmp_path) == rows


def test_globs_of_any_name_are_sorted_and_names_like_globs_are_names(tmp_path: Path) -> None:
    for index in (2, 0, 1):
        write_jsonl(tmp_path / f"part-{index}.jsonl", [make_rows(3)[index]])
    for pattern in ("part-[0-9].jsonl", "**/part-*"):
        assert ids_of(str(tmp_path / pattern)) == [0, 1, 2]

    first = write_jsonl(tmp_path / "a.data", make_rows(2))
    write_jsonl(tmp_path / "b.data", make_rows(4)[2:])
    second = write_parquet(tmp_path / "b[1]*.parquet", make_rows(4)[2:])

    assert ids_of(str(tmp_path / "*.data")) == [0, 1, 2, 3]
    assert ids_of(second) == [2, 3]
    assert ids_of([second, str(first), first]) == [2, 3, 0, 1, 0, 1]
