"""The tree of exceptions: one root, the builtin bases that were promised, messages of one form."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from fast_axolotl import errors
from fast_axolotl.errors import (
    AccessError,
    ConflictError,
    DataError,
    FastAxolotlError,
    MissingExtraError,
    MissingFileError,
    ResumeError,
    UsageError,
    mask_secrets,
    mask_words,
)

ALL = [item for name in errors.__all__ if isinstance(item := getattr(errors, name), type)]
OF_DATA = [kind for kind in ALL if issubclass(kind, DataError)]


def test_every_exception_of_the_module_is_listed_and_has_one_root() -> None:
    defined = [
        item
        for _, item in inspect.getmembers(errors, inspect.isclass)
        if item.__module__ == errors.__name__
    ]
    assert set(defined) == set(ALL)
    assert all(issubclass(kind, FastAxolotlError) for kind in ALL)


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (FastAxolotlError, {Exception}),
        (UsageError, {ValueError}),
        (MissingExtraError, {ImportError}),
        (DataError, {RuntimeError}),
        (MissingFileError, {DataError, RuntimeError, FileNotFoundError, OSError}),
        (AccessError, {DataError, RuntimeError, PermissionError, OSError}),
        (ConflictError, {DataError, RuntimeError}),
        (ResumeError, {DataError, RuntimeError, ValueError}),
    ],
)
def test_the_promised_bases(kind: type[Exception], bases: set[type]) -> None:
    assert bases <= set(kind.__mro__)


def test_the_docstring_draws_every_exception_under_its_parent() -> None:
    drawing = errors.__doc__ or ""
    assert [kind.__name__ for kind in ALL if kind.__name__ not in drawing] == []
    for kind in set(OF_DATA) - {DataError}:
        assert drawing.index("DataError") < drawing.index(kind.__name__)


@pytest.mark.parametrize("kind", OF_DATA)
@pytest.mark.parametrize(
    ("path", "place", "text"),
    [
        ("rows.jsonl", "line 7", "rows.jsonl, line 7: broken; mend it"),
        ("rows.jsonl", "", "rows.jsonl: broken; mend it"),
        ("", "line 7", "line 7: broken; mend it"),
        ("", "", "broken; mend it"),
    ],
)
def test_a_data_error_prints_the_file_and_the_place_first(
    kind: type[DataError], path: str, place: str, text: str
) -> None:
    error = kind("broken; mend it", path=path, place=place)
    assert str(error) == text
    assert (error.message, error.path, error.place) == ("broken; mend it", path, place)


@pytest.mark.parametrize("kind", OF_DATA)
def test_a_data_error_survives_pickling_and_copying(kind: type[DataError]) -> None:
    error = kind("broken; mend it", path="ünï.jsonl", place="line 7")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", [FastAxolotlError, UsageError, MissingExtraError])
def test_the_other_errors_survive_pickling(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("pass another")))
    assert (type(again), str(again)) == (kind, "pass another")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:pw@host/a.csv", "https://***@host/a.csv"),
        ("https://t0ken@host/a.csv", "https://***@host/a.csv"),
        ("s3://id:key@bucket/a?region=x&secret_key=y", "s3://***@bucket/a?region=x&secret_key=***"),
        (
            "503, url='https://h/a?part=1&X-Amz-Signature=s&X-Amz-Credential=c%2Fd&se=2#x'",
            "503, url='https://h/a?part=1&X-Amz-Signature=***&X-Amz-Credential=***&se=2#x'",
        ),
        (
            "https://h/a?X-Amz-Security-Token=t;sig=u",
            "https://h/a?X-Amz-Security-Token=***;sig=***",
        ),
        ("train --token=abc --hf-token def x", "train --token=*** --hf-token *** x"),
        (
            "sh -c 'HF_TOKEN=abc go --password \"a b\" on'",
            "sh -c 'HF_TOKEN=*** go --password *** on'",
        ),
        ("AWS_SECRET_ACCESS_KEY=a WANDB_API_KEY=b", "AWS_SECRET_ACCESS_KEY=*** WANDB_API_KEY=***"),
        *(
            (plain, plain)
            for plain in (
                "/data/key=5/token=6/HF_TOKEN=7/rows.parquet",
                "/data/a?token=b.jsonl",
                "hf://datasets/owner/name@0123abc/rows.parquet",
                "s3://bucket/mail@example/rows.jsonl?versionId=5",
                "--max-tokens 512 --eos-token </s> --tokenizer x --pad_token_id=0",
            )
        ),
    ],
)
def test_secrets_are_masked_and_nothing_else(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked
    error = DataError(f"failed: {text}", path=text)
    assert error.message == f"failed: {masked}"
    assert str(error).endswith(f"failed: {masked}")
    if "://" in text:
        assert error.path == masked
    else:
        assert error.path == text


def test_a_secret_may_be_a_word_of_its_own() -> None:
    words = ["go", "--hf-token", "my token", "--api-key=a b", "HF_TOKEN=x y", "--token", "--last"]
    masked = ("go", "--hf-token", "***", "--api-key=***", "HF_TOKEN=***", "--token", "--last")
    assert mask_words(words) == masked
