"""Start of the alert command: directly, or by systemd-run as a service of its own.

Guarantees: the operator's command is run word by word, and no text of a user is part of any command line: it
is in the JSON on standard input and in environment variables. For systemd-run the variables are in a file
that only root can read, because systemd expands `$` in arguments and shows them to everybody. A program that
others may write to is not run.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ciuic.config import AlertConfig, alert_flaw
from ciuic.errors import NotPermitted
from ciuic.system.child_process import SYSTEM_PATH, find_program

_PREFIX: Final = "alert-"
_SUFFIX: Final = ".env"
# Characters that need a backslash in a value between double quotes (systemd.exec(5), EnvironmentFile=).
_SPECIAL: Final = frozenset('"\\`$')


class Prepared(NamedTuple):
    """A command that is ready to be started. Call `discard` when it has ended."""

    command: list[str]
    how: dict[str, Any]
    """Keyword arguments for subprocess.Popen."""
    file: Path | None = None

    def discard(self) -> None:
        """Remove the file with the variables, if there is one."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)


def prepare(
    settings: AlertConfig, variables: Mapping[str, str], language: str, directory: Path | None
) -> Prepared:
    """Prepare one run of the command.

    Args:
        settings: the command, its user and time limit.
        variables: environment variables about the alert.
        language: value of LANG.
        directory: directory of root's own for the file of variables; None: start the command without systemd.

    Raises:
        NotPermitted: others may write to the program.
        KeyError: there is no such user.
        OSError: the file cannot be written.
    """
    flaw = alert_flaw(settings)
    if flaw is not None:
        raise NotPermitted(f"alert.command is not run: the {flaw.found}", hint=flaw.remedy)
    variables = {"PATH": SYSTEM_PATH, "LANG": language, **variables}
    if directory is not None:
        return _as_service(settings, variables, directory)
    how: dict[str, Any] = {"env": variables}
    if settings.user is not None:
        user = pwd.getpwnam(settings.user)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        how |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
        variables |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    return Prepared(list(settings.command), how)


def remove_left_over(directory: Path) -> None:
    """Remove files of variables that a killed daemon left."""
    with suppress(OSError):
        for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
            path.unlink(missing_ok=True)


def _as_service(settings: AlertConfig, variables: Mapping[str, str], directory: Path) -> Prepared:
    program, *words = settings.command
    if "$" in program:
        raise NotPermitted(
            f"alert.command is not run: systemd would expand the $ in {program}", hint="give it another name"
        )
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=directory)  # 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(environment_file(variables))
    command = [
        find_program("systemd-run"),
        # --collect: a unit that failed is removed too, and does not pile up in systemd.
        *("--pipe", "--wait", "--collect", "--quiet", "--service-type=exec"),
        # systemd keeps the time limit as well: the command is a child of systemd, and killing systemd-run
        # would leave it running.
        f"--property=RuntimeMaxSec={settings.timeout_seconds}",
        f"--property=EnvironmentFile={name}",
        *([] if settings.user is None else [f"--uid={settings.user}"]),
        "--",
        program,
        # A dollar sign is doubled for systemd, which expands variables in arguments (systemd.service(5),
        # COMMAND LINES).
        *(word.replace("$", "$$") for word in words),
    ]
    # Variables reach the command by the file alone; systemd-run itself needs none.
    return Prepared(command, {"env": {"PATH": SYSTEM_PATH}}, Path(name))


def environment_file(variables: Mapping[str, str]) -> bytes:
    """Return the variables in the format of EnvironmentFile= of systemd.exec(5), where nothing is expanded.

    The encoding is UTF-8.
    """
    lines = []
    for name, value in variables.items():
        quoted = "".join(f"\\{char}" if char in _SPECIAL else char for char in value)
        lines.append(f'{name}="{quoted}"\n')
    return "".join(lines).encode("utf-8", "backslashreplace")
