"""Find the files behind paths, folders, globs and URIs.

A path is a file, a folder, a glob or a URI; a list of them is read in its own order, a folder in
the sorted order of its files. Folders written by Hugging Face ``save_to_disk`` name their files
themselves. Where the names in a folder tell several splits apart, one has to be chosen: reading
the test rows into training, or leaving them out, would both be silent mistakes.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa

from fast_axolotl.errors import DataError, MissingFileError, UsageError, mask_secrets
from fast_axolotl.reading.formats import format_of_name, is_saved_dataset
from fast_axolotl.reading.remote import folder_of_pattern, remote_files
from fast_axolotl.reading.storage import Source, translate_os_errors

_Item = TypeVar("_Item")

_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in _SPLIT_WORDS.items() for word in words}

_SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(_SPLIT_OF_WORD)})(?![a-z])")

_NOT_DATA = re.compile(
    r"(^|/)([._].*|README.*|LICEN[SC]E.*|CHANGELOG.*|dataset_infos?\.json|dataset_dict\.json"
    r"|state\.json)$",
    re.IGNORECASE,
)


_KEY = re.compile(r"([^/=]+)=([^/]*)/")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What Hive writes for null."""


def find_files(
    paths: str | Path | Sequence[str | Path],
    *,
    split: str | None = None,
    storage_options: dict[str, Any] | None = None,
    retry_seconds: float = 300.0,
) -> tuple[list[Source], list[str]]:
    """The files that are meant, in order, and what is in folders and was passed over."""
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not listed or not all(str(path) for path in listed):
        raise UsageError("the path is empty; pass a file, a folder, a glob or a list of them")
    sources: list[Source] = []
    ignored: list[str] = []
    keys: dict[int, list[tuple[str, str]]] = {}
    for path in map(str, listed):
        if is_saved_dataset(path):
            sources += _saved_files(Path(path), split)
            continue
        if "://" in path and not path.startswith("file://"):
            found, root = remote_files(path, storage_options, retry_seconds)
            path = mask_secrets(path)
        else:
            found, root = _local_files(path, ignored)
        if root is None:  # one file, which is data whatever it is called
            data = [(PurePosixPath(found[0].identity).name, found[0])]
        else:
            named = [(source.path.removeprefix(root).lstrip("/"), source) for source in found]
            eligible = [(name, source) for name, source in named if not _NOT_DATA.search(name)]
            data = [(name, source) for name, source in eligible if format_of_name(name)[0]]
            if not data and folder_of_pattern(path) is not None and not Path(path).is_dir():
                data = eligible  # the pattern says which files are meant, whatever they are called
        if not data:
            raise MissingFileError(
                "no data files in this folder; pass another folder, or file names that end in "
                ".parquet, .arrow, .jsonl, .json, .csv or .txt, compressed or not",
                path=path,
            )
        by_split = []
        for name, source in data:
            words = _SPLIT_WORD.findall(name.lower())  # the last one says it
            by_split.append((_SPLIT_OF_WORD[words[-1]] if words else "", source))
            keys[id(source)] = [] if root is None else _KEY.findall(name)
        # A single file may be of any split, unless its name says otherwise.
        is_free = root is None and not by_split[0][0]
        sources += _choose(by_split, None if is_free else split, path)
        taken = {source.path for _, source in data}
        ignored += [source.path for source in found if source.path not in taken]
    return _with_keys(sources, [keys.get(id(source), []) for source in sources]), ignored


def _with_keys(sources: list[Source], keys: list[list[tuple[str, str]]]) -> list[Source]:
    """The sources with what folders such as ``lang=en`` say: integers where all values are."""
    if not any(keys):
        return sources
    kinds = {key: pa.int64() for of_source in keys for key, _ in of_source}
    for key, text in (item for of_source in keys for item in of_source):
        if text != _NO_VALUE and not re.fullmatch("0|-?[1-9][0-9]{0,17}", text):
            kinds[key] = pa.string()
    for index, of_source in enumerate(keys):
        values = dict[str, pa.Scalar]()
        for key, text in of_source:
            value = int(text) if kinds[key] == pa.int64() and text != _NO_VALUE else unquote(text)
            values[key] = pa.scalar(None if text == _NO_VALUE else value, kinds[key])
        if values:
            sources[index] = replace(sources[index], keys=tuple(values.items()))
    return sources


def _choose(named: list[tuple[str, _Item]], split: str | None, path: str) -> list[_Item]:
    """The items, each with the name of its split, that belong to the wanted one."""
    splits = {name: name or "(none)" for name, _ in named}
    if split == "all" or (split is None and len(splits) == 1):
        return [item for _, item in named]
    names = ", ".join(splits.values())
    if split is None:
        raise UsageError(
            f'{path}: the folder has several splits: {names}; pass split="train" for one of them, '
            'or split="all" for all'
        )
    wanted = split if split in splits else _SPLIT_OF_WORD.get(split)
    if wanted not in splits:
        raise UsageError(f"{path}: no split {split!r}; it has: {names}")
    return [item for name, item in named if name == wanted]


def _saved_files(folder: Path, split: str | None) -> list[Source]:
    """The files of a ``save_to_disk`` folder in the order that its own index gives."""
    if (folder / "dataset_dict.json").is_file():
        splits = _names_in(folder / "dataset_dict.json", "splits")
        folders = [(name, folder / name) for name in splits]
        chosen = _choose(folders, split, str(folder))
        return [source for part in chosen for source in _saved_files(part, None)]
    names = _names_in(folder / "state.json", "_data_files")
    with translate_os_errors(str(folder)):
        return [_local_source(f"{folder}/{name}") for name in names]


def _names_in(index: Path, key: str) -> list[str]:
    """What an index of a saved dataset lists: folders, or files, in its own folder."""
    try:
        with translate_os_errors(str(index)):
            content = json.loads(index.read_text(encoding="utf-8"))
        is_mapped = bool(content.get("_indices_data_files"))
        names = content[key] if key == "splits" else [item["filename"] for item in content[key]]
        for name in [*names] or [""]:
            if PurePosixPath(name).name != name or name in ("", ".."):
                raise ValueError(f"{name!r} is not the name of a file or folder beside it")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise DataError(
            f"the index of this saved dataset is corrupt ({type(error).__name__}: {error}); save "
            "the dataset again",
            path=str(index),
        ) from None
    if is_mapped:
        raise DataError(
            "this dataset was saved with an indices mapping; save it again after flatten_indices()",
            path=str(index.parent),
        )
    return list(names)


def _local_files(path: str, ignored: list[str]) -> tuple[list[Source], str | None]:
    """Every file that a path, glob or folder means, sorted; the folder, unless it is one file."""
    if path.startswith("file://"):
        path = unquote(path.removeprefix("file://"))
    target = Path(path).expanduser()
    with translate_os_errors(path):
        if target.is_dir():
            return [_local_source(item) for item in _walk(str(target), (), ignored)], str(target)
        if not target.exists() and (root := folder_of_pattern(str(target))) is not None:
            matches = glob.glob(str(target), recursive=True)  # noqa: PTH207 - absolute too
            files = [item for item in sorted(map(Path, matches)) if item.is_file()]
            if not files:
                raise MissingFileError("no file matches this pattern; check the pattern", path=path)
            return [_local_source(str(item)) for item in files], root
        return [_local_source(str(target))], None


def _walk(folder: str, above: tuple[tuple[int, int], ...], ignored: list[str]) -> Iterator[str]:
    """All files below a folder, in order; what cannot be listed is an error, and so is a dangling
    link. Links to folders are followed, but for one to a folder that it is in."""
    facts = Path(folder).stat()
    if (place := (facts.st_dev, facts.st_ino)) in above:
        ignored.append(folder)
        return
    with os.scandir(folder) as listed:
        entries = sorted(listed, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, (*above, place), ignored)
        elif entry.is_file() or (entry.is_symlink() and not entry.name.startswith(".")):
            yield entry.path


def _local_source(path: str) -> Source:
    facts = os.stat(path)  # noqa: PTH116 - there may be thousands
    return Source(path=path, num_bytes=facts.st_size, version=str(facts.st_mtime_ns))
