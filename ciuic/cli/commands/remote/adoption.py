"""This host uses a remote from now on: key file, configuration, repository, daemon, upload.

Guarantees: what this host would refuse is refused before anything is written to the remote (`require_adoptable`); the key of this host opens the remote before the configuration names it; a repository that holds
snapshots is never touched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.output import note
from ciuic.errors import CiuicError, ConfigError, NotPermitted, Unreachable, UsageError

if TYPE_CHECKING:
    from ciuic.cli.shared.session import Session
    from ciuic.config import RemoteConfig
    from ciuic.remote.access import Remote
    from ciuic.remote.sealing.key_slots import SlotSecret

_UPLOAD_UNIT = "ciuic-upload.service"


class Adopted(NamedTuple):
    """Result of adopting a remote on this host."""

    config_file: Path
    config_changed: bool
    repository: Path | None
    """None: not known yet, as no directory is protected."""
    choice: str
    """Outcome as in `RepositoryChoice`; ``later`` where the repository is made by ``ciuic protect``."""
    upload_started: bool

    def document(self) -> dict[str, Any]:
        """Return the fields of the JSON document."""
        return {
            "config": str(self.config_file),
            "config_changed": self.config_changed,
            "repository": None if self.repository is None else str(self.repository),
            "repository_state": self.choice,
            "upload_started": self.upload_started,
        }


def key_file_path(session: Session, config: RemoteConfig, given: Path | None) -> Path:
    """Return where the key file of this host is or will be: named, configured, or beside the configuration.

    Raises:
        UsageError: the configuration names another one, from which the upload would take the key.
    """
    from ciuic.config import writable_file

    if given is not None:
        path = Path(os.path.abspath(given))
        if config.key_command or config.key_file not in (None, path):
            raise UsageError(
                f"the configuration has a key of its own for the remote {config.name}: "
                f"{config.key_file or config.key_command[0]}",
                hint="leave --key-file out, or change the configuration",
            )
        return path
    if config.key_file is not None:
        return config.key_file
    return writable_file(session.config_option).parent / f"remote-{config.name}.key"


def host_secret(config: RemoteConfig, path: Path) -> SlotSecret:
    """Return the key of this host: what the configured command prints, the configured file, or a new file.

    Raises:
        UsageError: there is a file already, and the configuration does not name it.
    """
    from ciuic.remote.sealing.key_slots import make_key_file, read_key_file, run_key_command

    if config.key_command:
        return run_key_command(config.key_command)
    if config.key_file == path and path.exists():
        return read_key_file(str(path))
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    return make_key_file(str(path))


def require_writable_config(session: Session) -> Path:
    """Return the configuration file that will name the remote; raise before anything is made if it cannot be written."""
    from ciuic.config import writable_file
    from ciuic.config.flat import is_flat

    file = writable_file(session.config_option)
    if is_flat(file):
        raise ConfigError(
            f"{file} is in the flat format, which has no remotes",
            hint="`ciuic config convert` makes a TOML file of it",
        )
    there = file
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK):
        raise NotPermitted(
            f"{file} may not be written", hint="run it as root, or name another file with --config"
        )
    return file


def require_adoptable(session: Session, config: RemoteConfig, file: Path) -> None:
    """Raise what `adopt` would raise of the configuration file and the place of the repository, before anything is made.

    Args:
        session: Session.
        config: The remote as it will be written.
        file: The configuration file.
    """
    from ciuic.config import write_remote

    write_remote(file, config, dry_run=True)
    _repository_place(session)


def adopt(session: Session, config: RemoteConfig, remote: Remote, file: Path) -> Adopted:
    """Write the configuration, have a repository, tell the daemon, and start the upload."""
    from ciuic.config import write_remote

    # No remote in clear is configured by accident: the user who gives its URL has been asked.
    changed = write_remote(file, replace(config, encryption=remote.stored.sealed))
    runs = session.control.is_running()
    path, choice = _repository(session, remote, daemon_runs=runs)
    if runs:
        _reload(session)
    return Adopted(file, changed, path, choice, _start_upload())


def _repository(session: Session, remote: Remote, *, daemon_runs: bool) -> tuple[Path | None, str]:
    from ciuic.remote.access import join_repository, shares_chunks
    from ciuic.repository import Repository

    path = _repository_place(session)
    if path is None:
        return None, "later"
    if daemon_runs and Repository.exists(path):
        # The daemon knows the identity of its repository since its start.
        with Repository.open(path) as repository:
            if shares_chunks(repository, remote):
                return path, "shares"
            empty = not repository.snapshots.names()
        if empty:
            warn(
                "the repository is empty and has another identity than the remote, but the daemon uses it",
                hint="to share chunks with other hosts: ciuic stop, ciuic remote join, then start it again",
            )
        return path, "own-identity"
    return path, join_repository(path, remote, refuse_foreign=not session.trusts_repository).value


def _repository_place(session: Session) -> Path | None:
    """Return where the repository is or will be; None if no directory is protected yet.

    Raises:
        CiuicError: it must not be there: others may write there, or its disk is absent.
    """
    from ciuic.cli.shared.new_repository import refuse_absent_disk
    from ciuic.repository import Repository
    from ciuic.repository.trust import require_own

    try:
        path = session.repository_dir
        roots = session.config.roots
    except ConfigError:
        return None
    require_own(path, trusted=session.trusts_repository)
    if not Repository.exists(path):
        refuse_absent_disk(session, roots, path)
    return path


def _reload(session: Session) -> None:
    try:
        session.control.reload()
    except CiuicError as error:
        if not isinstance(error, Unreachable):
            warn(
                f"the daemon did not take over the configuration: {shown_text(error.message)}",
                hint="ciuic reload",
            )


def _start_upload() -> bool:
    """Start the unit that uploads where it is installed, and return whether it was."""
    from ciuic.cli.shared.systemd import Systemd

    system = Systemd()
    if not system.runs or not (system.unit_dir / _UPLOAD_UNIT).exists():
        return False
    try:
        # restart: a process that runs has read the configuration before.
        system.call("restart", _UPLOAD_UNIT)
    except CiuicError as error:
        warn(shown_text(error.message), hint=f"systemctl restart {_UPLOAD_UNIT}")
        return False
    return True


def say(adopted: Adopted) -> None:
    """Tell in words what was done on this host, and what is left to do."""
    if adopted.config_changed:
        note(f"{shown_text(str(adopted.config_file))} names the remote")
    where = shown_text(str(adopted.repository))
    if adopted.choice == "made":
        note(f"repository {where} made; it shares chunks with all hosts of the remote")
    elif adopted.choice == "replaced":
        note(f"the empty repository {where} was made anew; it shares chunks with all hosts of the remote")
    elif adopted.choice == "own-identity":
        note(
            f"the repository {where} keeps its own identity: its snapshots go to the remote, "
            "but share no chunks with those of other hosts"
        )
    elif adopted.choice == "later":
        note(
            "no directory is protected yet; `ciuic protect PATH` makes a repository that shares chunks with the remote"
        )
    if adopted.upload_started:
        note(f"{_UPLOAD_UNIT} is running: `ciuic remote status` shows how far it is")
    else:
        note("nothing uploads yet: `ciuic remote upload` does, under systemd after `ciuic service install`")
