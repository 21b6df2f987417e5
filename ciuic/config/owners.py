"""Check that only root can change what root's daemon and commands obey: the configuration and what it names.

Guarantees: nothing is opened or changed. The checks apply to root alone: another user's commands can do no
more than that user. Roots, and the files of watched trainings, belong to others by their nature and are left
out.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ciuic.config.model import AlertConfig, Config, Origin, Problem
from ciuic.errors import ConfigError
from ciuic.system.ownership import Flaw, find_flaw

# Programs that run a file named in their arguments.
_INTERPRETERS: Final = r"^(ba|da|k|z|c|tc|fi)?sh$|^(python|perl|ruby|node|lua|php)[0-9.]*$|^env$"


def check_owners(config: Config) -> Iterator[Problem]:
    """Yield what others may change of what ``config`` names; places.py checks the repository."""
    if os.geteuid() != 0:
        return
    flaw = _flaw(config.runtime_dir)
    if flaw is not None:
        message = f"daemon.runtime_dir: the {flaw.found}; another user could put sockets of its own there"
        yield Problem("error", message, flaw.remedy, config.origin("daemon.runtime_dir"))
    flaw = alert_flaw(config.alert)
    if flaw is not None:
        # Only a warning, as for a missing program: a daemon without alerts is better than none.
        message = f"alert.command is not run: the {flaw.found}"
        yield Problem("warning", message, flaw.remedy, config.origin("alert.command"))


def refuse_foreign_file(path: Path) -> None:
    """Raise ConfigError if root is to act on a configuration file that others may write or replace."""
    problem = check_file(path)
    if problem is not None:
        raise problem.error(problem.message, hint=problem.hint)


def check_file(path: Path) -> Problem | None:
    """Return what is wrong with owner or mode of a configuration file, or of a directory on the way to it."""
    # Everybody may write to /dev/null, and nobody changes what is read from it: it stands for an empty
    # configuration.
    flaw = _flaw(path) if os.geteuid() == 0 and str(path) != os.devnull else None
    if flaw is None:
        return None
    message = (
        f"the configuration file {path} must be root's own, and so must every directory on the way to it; "
        f"the {flaw.found}"
    )
    return Problem("error", message, flaw.remedy, Origin("file", str(path)), ConfigError)


def alert_flaw(alert: AlertConfig) -> Flaw | None:
    """Return the first flaw of the alert program, or of a script that it interprets; None for none."""
    owners = []
    if alert.user is not None:
        # `places.check_alert` reports the unknown user.
        with suppress(KeyError):
            owners = [pwd.getpwnam(alert.user).pw_uid]
    return command_flaw(alert.command, owners)


def command_flaw(command: Sequence[str], owners: Iterable[int] = ()) -> Flaw | None:
    """Return the first flaw of a program that root is to run, or of a script that it interprets; None for none.

    Args:
        command: Program and arguments.
        owners: Uids that may own them, besides root.
    """
    if os.geteuid() != 0:
        return None
    for word in _programs(command):
        flaw = _flaw(Path(word), *owners)
        if flaw is not None:
            return flaw
    return None


def file_flaw(path: Path) -> Flaw | None:
    """Return the first flaw of a file that root is to read, or of a directory on the way to it; None for none."""
    return _flaw(path) if os.geteuid() == 0 else None


def _programs(command: Sequence[str]) -> Iterator[str]:
    interpreted = bool(command) and re.match(_INTERPRETERS, os.path.basename(command[0])) is not None
    for position, word in enumerate(command):
        # What an interpreter is told to run decides as much as the interpreter.
        if position == 0 or (interpreted and word.startswith("/") and _is_file(word)):
            yield word


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _flaw(path: Path, *owners: int) -> Flaw | None:
    try:
        return find_flaw(path, owners=owners)
    except OSError:
        # The caller that opens the file reports why it cannot.
        return None
