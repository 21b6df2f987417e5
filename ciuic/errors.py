"""Errors that the operator or a script sees, each with its exit code (docs/cli.md).

Exit codes are never renumbered. An error is raised where the fact is known, and turned into an exit code or
an HTTP status once, at the edge. The classes are nouns.
"""

from __future__ import annotations

import sys
from typing import ClassVar, TypeVar

_Error = TypeVar("_Error", bound="CiuicError")


class CiuicError(Exception):
    """Base of all errors; ``message`` says what failed, ``hint`` what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def anew(self: _Error, message: str | None = None, *, hint: str | None = None) -> _Error:
        """Return another error of the same class with the same facts, without a traceback.

        For an error that several threads or tasks raise, or that is raised with more context: a constructor takes what its class needs.

        Args:
            message: Message in place of this one's; None: the same.
            hint: Hint in place of this one's; None: the same.
        """
        text = self.message if message is None else message
        other = type(self).__new__(type(self), text)
        other.__dict__.update(self.__dict__)
        other.args = (text,)
        other.message = text
        other.hint = self.hint if hint is None else hint
        return other


def pip_install(*words: str) -> str:
    """Return the command that installs packages where this program finds them: ``/opt/ciuic/bin/python -m pip install WORDS``."""
    # Imported where it is asked for: a snapshot on command loads this module and nothing that it can do without.
    import shlex

    return shlex.join(
        (sys.executable or "python3", "-m", "pip", "install", *(words or ("--upgrade", "ciuic")))
    )


class UsageError(CiuicError):
    """Invalid request: an option, a path or a configuration file."""

    exit_code = 2


class ConfigError(UsageError):
    """Invalid configuration; the message names file and line."""


class NotFound(CiuicError):
    """Unknown snapshot, path or root."""

    exit_code = 3


class Damaged(CiuicError):
    """Stored bytes do not match their checksum, or a part of the repository is missing."""

    exit_code = 4


class Unreachable(CiuicError):
    """Connection to the daemon failed."""

    exit_code = 5


class DestinationExists(CiuicError):
    """Restore refused because it would replace existing files."""

    exit_code = 6
    conflicts: tuple[bytes, ...] = ()
    """Every conflicting path, where there are several; the message names only the first ones."""


class NotPermitted(CiuicError):
    """Operation that the caller is not allowed to do."""

    exit_code = 7


class Partial(CiuicError):
    """Operation done in part; the message lists what was not done."""

    exit_code = 8


class Busy(CiuicError):
    """Repository locked by another writer."""

    # EX_TEMPFAIL of sysexits.h: a caller may try again, and ciuic-scrub.service takes it for a success.
    exit_code = 75


# One class for each code, so that an error that crosses the control socket has its exit code again.
# ConfigError returns as the UsageError that it refines.
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


def error_of(code: int, message: str, *, hint: str = "") -> CiuicError:
    """Return the error of another process as the class that has its exit code; a newer version's code may be unknown."""
    return BY_EXIT_CODE.get(code, CiuicError)(message, hint=hint)
