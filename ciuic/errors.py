"""Errors that a person or a script will see: nouns, each with its exit code (cli.md; never renumbered).

Raised where the fact is known; turned into an exit code or an HTTP status once, at the edge.
"""

from __future__ import annotations

from typing import ClassVar


class CiuicError(Exception):
    """Something failed; ``message`` says what happened and to what, ``hint`` what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CiuicError):
    """The request itself is wrong: an option, a path, a configuration file."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file says something that cannot be meant; the message names file and line."""


class NotFound(CiuicError):
    """No such snapshot, path or root."""

    exit_code = 3


class Damaged(CiuicError):
    """Stored bytes do not match their checksum, or a part of the repository is missing."""

    exit_code = 4


class Unreachable(CiuicError):
    """The daemon cannot be reached."""

    exit_code = 5


class DestinationExists(CiuicError):
    """A restore would replace something and was not told to."""

    exit_code = 6
    conflicts: tuple[bytes, ...] = ()
    """All paths that are in the way, where there are several; the message names the first ones."""


class NotPermitted(CiuicError):
    """The caller may not do this."""

    exit_code = 7


class Partial(CiuicError):
    """Done in part; the message lists what was not."""

    exit_code = 8


class Busy(CiuicError):
    """Another process writes to the repository."""

    exit_code = 75


BY_EXIT_CODE: dict[int, type[CiuicError]] = {
    cls.exit_code: cls
    for cls in (
        CiuicError,
        UsageError,
        NotFound,
        Damaged,
        Unreachable,
        DestinationExists,
        NotPermitted,
        Partial,
        Busy,
    )
}
