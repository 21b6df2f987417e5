"""Check what the remotes of a configuration name on this machine: the files and programs with their keys.

Guarantees: only warnings, because snapshots are taken without remotes as well; nothing is opened or run, and no
remote is reached. `ciuic remote test` reaches it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ciuic.config.model import Config, Problem, RemoteConfig
from ciuic.config.owners import command_flaw, file_flaw

# Bits of the mode that let others than the owner do anything with a key.
_OTHERS = 0o077


def check_remotes(config: Config) -> list[Problem]:
    """Return why snapshots would not be sent to a remote unattended, or its key be known to others."""
    return [problem for remote in config.remotes for problem in _check_one(remote)]


def _check_one(remote: RemoteConfig) -> Iterator[Problem]:
    if remote.key_file is not None:
        yield from _check_key_file(remote)
    elif remote.key_command:
        yield from _check_key_command(remote)
    elif remote.encryption:
        message = f"the remote {remote.name} has neither key_file nor key_command"
        hint = "without one nothing is sent unattended; `ciuic remote keys add` makes a key file"
        yield Problem("warning", message, hint, remote.origin)


def _check_key_file(remote: RemoteConfig) -> Iterator[Problem]:
    path, origin = remote.key_file, remote.origins.get("key_file", remote.origin)
    assert path is not None
    try:
        status = os.stat(path)
    except FileNotFoundError:
        yield Problem("warning", f"remote.key_file: there is no file {path}", origin=origin)
        return
    except OSError:
        # Another user's command may not see it; the process that needs it reports why it cannot be read.
        return
    if not stat.S_ISREG(status.st_mode):
        yield Problem("warning", f"remote.key_file: {path} is not a regular file", origin=origin)
        return
    if status.st_mode & _OTHERS:
        message = f"remote.key_file: {path} has mode {stat.S_IMODE(status.st_mode):04o}, and must be its owner's alone"
        yield Problem("warning", message, f"chmod 600 {path}", origin)
    flaw = file_flaw(path)
    if flaw is not None:
        message = f"remote.key_file: the {flaw.found}"
        yield Problem("warning", message, flaw.remedy, origin)


def _check_key_command(remote: RemoteConfig) -> Iterator[Problem]:
    origin = remote.origins.get("key_command", remote.origin)
    program = remote.key_command[0]
    if not os.access(program, os.X_OK):
        message = f"remote.key_command: {program} is no program that can be run"
        yield Problem("warning", message, origin=origin)
    flaw = command_flaw(remote.key_command)
    if flaw is not None:
        yield Problem("warning", f"remote.key_command: the {flaw.found}", flaw.remedy, origin)
