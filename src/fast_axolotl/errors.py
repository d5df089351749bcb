"""Every exception this package raises on purpose.

    FastAxolotlError
    ├── UsageError            (ValueError)    an argument that cannot be meant
    ├── MissingExtraError     (ImportError)   an optional package is not installed
    └── DataError             (RuntimeError)  something in the data or its storage
        ├── MissingFileError  (FileNotFoundError)
        ├── AccessError       (PermissionError)
        ├── ConflictError     two types that no common type holds
        └── ResumeError       (ValueError)    a saved state that does not fit these files

A message says what happened, shows the actual value, and says what to do. A ``DataError`` also
carries the file and the place inside it, so that a caller can list them.
"""

from __future__ import annotations

__all__ = [
    "AccessError",
    "ConflictError",
    "DataError",
    "FastAxolotlError",
    "MissingExtraError",
    "MissingFileError",
    "ResumeError",
    "UsageError",
]


class FastAxolotlError(Exception):
    """The root: catch this to catch everything raised here on purpose."""


class UsageError(FastAxolotlError, ValueError):
    """An argument that cannot be meant."""


class MissingExtraError(FastAxolotlError, ImportError):
    """An optional package is needed and not installed."""


class DataError(FastAxolotlError, RuntimeError):
    """Something in the data or its storage is wrong."""

    def __init__(self, message: str, *, path: str = "", place: str = "") -> None:
        where = ", ".join(part for part in (path, place) if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        """What is wrong, without the place."""
        self.path = path
        """The file or URI, empty where none is meant."""
        self.place = place
        """The place inside the file: ``line 7``, ``row group 2``; empty where none is meant."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.path, self.place)


class MissingFileError(DataError, FileNotFoundError):
    """A file or folder that is not there."""


class AccessError(DataError, PermissionError):
    """A file that is there and may not be read."""


class ConflictError(DataError):
    """Two types in one column that no common type holds without loss."""


class ResumeError(DataError, ValueError):
    """A saved state that belongs to other files, another order or another version."""


def _rebuild(kind: type[DataError], message: str, path: str, place: str) -> DataError:
    return kind(message, path=path, place=place)
