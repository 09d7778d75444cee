"""Errors that say what went wrong, where, and what to do next; each class owns its exit code."""

from __future__ import annotations


class BenchError(Exception):
    """A failure that a person can act on.

    `message` says what and where, `hint` what to do next. The command lines print both and leave
    with `exit_code` (1 threshold or failed case, 2 wrong input, 3 nothing could run).
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class InputError(BenchError):
    """Wrong usage or input: a file, key or value that cannot be used."""

    exit_code = 2


class CannotRunError(BenchError):
    """Nothing could run: a launcher, a library or a device is missing."""

    exit_code = 3


class RankError(BenchError):
    """One rank failed or did not answer; the message names rank, host and operation."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ranks = ranks


class ConfigMismatchError(RankError):
    """Ranks disagree about a field of the configuration."""


class UsageError(InputError):
    """A call of the Python API with arguments that the contract does not allow."""
