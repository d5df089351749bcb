"""All exceptions that this package raises on purpose.

    FastAxolotlError
    ├── UsageError            (ValueError)    a wrong argument
    ├── MissingExtraError     (ImportError)   an optional package is not installed
    └── DataError             (RuntimeError)  something in the data or its storage
        ├── MissingFileError  (FileNotFoundError)
        ├── AccessError       (PermissionError)
        ├── ConflictError     two types that no common type holds
        └── ResumeError       (ValueError)    a saved state that does not fit these files

A message says what happened, shows the actual value, and says what to do. A ``DataError`` also
carries the file and the place inside it, so that a caller can list them. Secrets in addresses are
masked in every ``DataError``, whoever wrote its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

_URI = re.compile(r"\b[A-Za-z][\w+.-]*://[^\s'\"<>]+")
_USER = re.compile(r"^(\w[\w+.-]*://)(?:[^/?#@]*:[^/?#@]*|(?<=http://|ttps://)[^/?#@]+)@")
_QUERY = re.compile(
    r"([?&;](?:[\w.-]*(?:token|secret|passw|credential|signature|api[-_]?key|access[-_]?key)"
    r"[\w.-]*|sig|key|pwd|policy|auth)=)[^&;#]*",
    re.IGNORECASE,
)
_OPTION = (
    r"--?(?:token|(?:[\w.-]*[_.-])?(?:(?:hf|hub|auth|access|api|session|security|github)[_-]token"
    r"|password|passwd|secret|(?:api|access|secret|private)[_-]?key))"
)
"""Options that hold secrets; ``--max-tokens`` and ``--eos-token`` do not."""

_VARIABLE = r"(?:[A-Z0-9]+_)*(?:TOKEN|SECRET|PASSWORD|PASSWD|(?:API|ACCESS|SECRET|PRIVATE)_?KEY)"
_WORD = re.compile(
    rf"(?<![^\s'\"])({_OPTION}(?:=|\s+(?!-))|{_VARIABLE}=)(?:\"[^\"]*\"|'[^']*'|[^\s'\"]+)"
)


def mask_secrets(text: str) -> str:
    """The text with ``***`` for passwords, tokens and signatures in addresses and command lines.

    A path that is no URI stays as it is, whatever it is called.

    >>> mask_secrets("https://me:pw@host/a.parquet?part=1&X-Amz-Signature=0f3a")
    'https://***@host/a.parquet?part=1&X-Amz-Signature=***'
    """
    if "://" in text:
        text = _URI.sub(lambda uri: _QUERY.sub(r"\1***", _USER.sub(r"\1***@", uri[0])), text)
    return _WORD.sub(r"\1***", text)


def mask_words(words: Iterable[str]) -> tuple[str, ...]:
    """A command's words, masked likewise; a secret may be a word of its own.

    >>> mask_words(["train", "--hf-token", "abc", "WANDB_API_KEY=d e", "--max-tokens", "9"])
    ('train', '--hf-token', '***', 'WANDB_API_KEY=***', '--max-tokens', '9')
    """
    masked: list[str] = []
    is_next = False
    for word in words:
        name, mark, _ = word.partition("=")
        is_name = re.fullmatch(f"{_OPTION}|{_VARIABLE}", name) is not None
        if is_next and not word.startswith("-"):
            masked.append("***")
        else:
            masked.append(f"{name}=***" if is_name and mark else mask_secrets(word))
        is_next = is_name and not mark and name.startswith("-")
    return tuple(masked)


class FastAxolotlError(Exception):
    """The base class: catch this to catch every error that this package raises on purpose."""


class UsageError(FastAxolotlError, ValueError):
    """An argument has a value that is not allowed."""


class MissingExtraError(FastAxolotlError, ImportError):
    """An optional package is needed and not installed."""


class DataError(FastAxolotlError, RuntimeError):
    """Something in the data or its storage is wrong."""

    def __init__(self, message: str, *, path: str = "", place: str = "") -> None:
        message, path = mask_secrets(message), mask_secrets(path) if "://" in path else path
        where = ", ".join(part for part in (path, place) if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        """What is wrong, without the place."""
        self.path = path
        """The file or URI, empty where none is meant."""
        self.place = place
        """The place inside the file: ``line 7``, ``row group 2``; empty where none is meant."""

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), path=self.path, place=self.place), (self.message,)


class MissingFileError(DataError, FileNotFoundError):
    """A file or folder does not exist."""


class AccessError(DataError, PermissionError):
    """A file exists but may not be read."""


class ConflictError(DataError):
    """A column has two types without a common type that keeps all values."""


class ResumeError(DataError, ValueError):
    """A saved state belongs to other files, another order or another version."""
