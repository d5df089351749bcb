"""The tree of exceptions: one root, the builtin bases that were promised, messages of one form."""

from __future__ import annotations

import copy
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


BASES: dict[type[Exception], set[type]] = {
    FastAxolotlError: {Exception},
    UsageError: {ValueError},
    MissingExtraError: {ImportError},
    DataError: {RuntimeError},
    MissingFileError: {DataError, FileNotFoundError},
    AccessError: {DataError, PermissionError},
    ConflictError: {DataError},
    ResumeError: {DataError, ValueError},
}


def test_the_tree_has_one_root_the_promised_bases_and_is_drawn() -> None:
    drawing = errors.__doc__ or ""
    assert set(ALL) == set(BASES)
    for kind, bases in BASES.items():
        assert bases | {FastAxolotlError} <= set(kind.__mro__)
        assert kind.__name__ in drawing
    assert all(drawing.index("DataError") <= drawing.index(kind.__name__) for kind in OF_DATA)


@pytest.mark.parametrize("kind", OF_DATA)
@pytest.mark.parametrize(
    ("path", "place", "text"),
    [
        ("ünï.jsonl", "line 7", "ünï.jsonl, line 7: broken; mend it"),
        ("ünï.jsonl", "", "ünï.jsonl: broken; mend it"),
        ("", "line 7", "line 7: broken; mend it"),
        ("", "", "broken; mend it"),
    ],
)
def test_a_data_error_prints_the_file_and_the_place_first_and_can_be_copied(
    kind: type[DataError], path: str, place: str, text: str
) -> None:
    error = kind("broken; mend it", path=path, place=place)
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is kind
        assert str(same) == text
        assert (same.message, same.path, same.place) == ("broken; mend it", path, place)


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
        ("/data/key=5/token=6/HF_TOKEN=7/rows.parquet", ""),
        ("/data/a?token=b.jsonl", ""),
        ("hf://datasets/owner/name@0123abc/rows.parquet", ""),
        ("s3://bucket/mail@example/rows.jsonl?versionId=5", ""),
        ("--max-tokens 512 --eos-token </s> --tokenizer x --pad_token_id=0", ""),
    ],
)
def test_secrets_are_masked_and_nothing_else(text: str, masked: str) -> None:
    masked = masked or text
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked
    error = DataError(f"failed: {text}", path=text)
    assert error.message == f"failed: {masked}"
    assert str(error).endswith(f"failed: {masked}")
    assert error.path == (masked if "://" in text else text)


def test_a_secret_may_be_a_word_of_its_own() -> None:
    words = ["go", "--hf-token", "my token", "--api-key=a b", "HF_TOKEN=x y", "--token", "--last"]
    masked = ("go", "--hf-token", "***", "--api-key=***", "HF_TOKEN=***", "--token", "--last")
    assert mask_words(words) == masked
