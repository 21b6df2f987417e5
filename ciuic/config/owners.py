"""Whether others than root may change what root's daemon and commands are told: the configuration, and what it names.

Guarantees: nothing is opened or changed. Asked by root alone: another user's commands can do no more than that user. Left out is what
belongs to others by its nature: roots, and the files of trainings that are watched.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ciuic.config.model import AlertConfig, Config, Origin, Problem
from ciuic.errors import ConfigError
from ciuic.ownership import Flaw, find_flaw

_INTERPRETERS: Final = re.compile(r"^(ba|da|k|z|c|tc|fi)?sh$|^(python|perl|ruby|node|lua|php)[0-9.]*$|^env$")
"""Programs that run a file which is named in their arguments."""


def check_owners(config: Config) -> Iterator[Problem]:
    """What others may change of what ``config`` names, but for the repository (places.py)."""
    if os.geteuid() != 0:
        return
    flaw = _flaw(config.runtime_dir)
    if flaw is not None:
        message = f"daemon.runtime_dir: the {flaw.found}; whoever can may put sockets of its own there"
        yield Problem("error", message, flaw.remedy, config.origin("daemon.runtime_dir"))
    flaw = alert_flaw(config.alert)
    if flaw is not None:
        # Only a warning, as a program that is not there: a daemon that tells nobody is better than none.
        message = f"alert.command is not run: the {flaw.found}"
        yield Problem("warning", message, flaw.remedy, config.origin("alert.command"))


def refuse_foreign_file(path: Path) -> None:
    """Raise ConfigError where root is to act on a configuration file that others may write or replace."""
    problem = check_file(path)
    if problem is not None:
        raise problem.error(problem.message, hint=problem.hint)


def check_file(path: Path) -> Problem | None:
    """What is wrong with owner or mode of a configuration file, or of a directory on the way to it."""
    # Everybody may write to /dev/null, and nobody changes what is read from it: it stands for an empty configuration.
    flaw = _flaw(path) if os.geteuid() == 0 and str(path) != os.devnull else None
    if flaw is None:
        return None
    message = f"the configuration file {path} must be root's own, and so must every directory on the way to it; the {flaw.found}"
    return Problem("error", message, flaw.remedy, Origin("file", str(path)), ConfigError)


def alert_flaw(alert: AlertConfig) -> Flaw | None:
    """The first flaw of the program that alerts are told by, and of a script that it interprets; None for none."""
    if os.geteuid() != 0:
        return None
    owners = []
    if alert.user is not None:
        with suppress(KeyError):  # said elsewhere
            owners = [pwd.getpwnam(alert.user).pw_uid]
    for word in _programs(alert.command):
        flaw = _flaw(Path(word), *owners)
        if flaw is not None:
            return flaw
    return None


def _programs(command: tuple[str, ...]) -> Iterator[str]:
    interpreted = bool(command) and _INTERPRETERS.match(os.path.basename(command[0])) is not None
    for position, word in enumerate(command):
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
        return None  # whoever opens it says why it cannot be
