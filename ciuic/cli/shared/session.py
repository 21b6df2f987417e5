"""State of one run of the program: global options, and the configuration, repository and daemon that they lead to.

Guarantees: nothing is read before a command asks for it, so ``--repo`` works without any configuration file and a broken
one stops only the commands that need it. Leaves the meaning of the configuration to ``ciuic.config``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from ciuic.cli.shared.messages import complain, warn

if TYPE_CHECKING:
    from ciuic.config import Config
    from ciuic.protocol.control import ControlClient
    from ciuic.repository import Repository


@dataclass
class Session:
    """State of one run. ``now_ns`` is a field so that a test can hold it still."""

    config_option: Path | None = None
    repo_option: Path | None = None
    trust_option: bool = False
    """--trust-repository was given: the repository may belong to another user."""
    verbosity: int = 0
    """-1 quiet, 0, 1 verbose, 2 with tracebacks."""
    json: bool = False
    """--json was given: a failure, too, is reported as one document on stdout."""
    printed_json: bool = False
    """The document is out: a failure after it must not print a second one."""
    stdout_gone: bool = False
    """The reader of stdout has left: nothing more is printed, and the exit code still counts."""
    now_ns: int = field(default_factory=time.time_ns)
    _config: Config | None = None
    _repository: Repository | None = None
    _control: ControlClient | None = None
    _closing: ExitStack = field(default_factory=ExitStack)

    @property
    def config(self) -> Config:
        """The effective configuration; ConfigError names file and line of what cannot be meant."""
        if self._config is None:
            # Imported with the first use: 70 ms, which `--repo` and the commands that need no configuration
            # do not pay.
            from ciuic.config import load_config

            self._config = load_config(
                self.config_option, repository=self.repo_option, trust_repository=self.trust_option
            )
        return self._config

    @property
    def repository_dir(self) -> Path:
        """--repo, CIUIC_REPO, or what the configuration says; UsageError where none of them says anything."""
        # Before the configuration, which is not read then: a rescue must work where it is missing or broken.
        given = self.repo_option or environment_path("CIUIC_REPO")
        if given is not None:
            return given
        from ciuic.config import repository_path
        from ciuic.errors import ConfigError

        try:
            return repository_path(self.config)
        except ConfigError as error:
            raise ConfigError(error.message, hint=self._hint_without_file(error.hint)) from None

    def _hint_without_file(self, hint: str) -> str:
        """The hint of a configuration that is not valid, and how snapshots are read while it is not."""
        from ciuic.cli.shared.names import shown_text
        from ciuic.config.salvage import readable_part
        from ciuic.errors import CiuicError

        try:
            # With the path in it the command can be typed at once, by somebody who needs a file back.
            named = readable_part(self.config_option).repository.path
        except (CiuicError, OSError):  # no part of it can be read
            named = None
        place = shown_text(str(named)) if named is not None else "DIR"
        return "\n".join(filter(None, (hint, f"--repo {place} reads the repository without this file")))

    @property
    def repository(self) -> Repository:
        """The repository, open for reading (no lock) until the run ends. Of another user's root is told."""
        if self._repository is None:
            from ciuic.repository import Repository, log

            # Before it is opened, because opening may log. Without a sink the library would log to stdout,
            # which is for results.
            log.sink = self._library_event
            self._closing.callback(setattr, log, "sink", None)
            self._repository = self._closing.enter_context(Repository.open(self.repository_dir))
            self._say_if_foreign()
        return self._repository

    @property
    def own_repository(self) -> Repository:
        """The same, to be written to. ForeignRepository where root was not told to write into another user's."""
        from ciuic.repository.trust import require_own

        require_own(self.repository_dir, trusted=self.trusts_repository)
        return self.repository

    @property
    def trusts_repository(self) -> bool:
        """Return True if the repository may belong to another user. The configuration speaks only of the repository that it names."""
        # --repo names a repository of which the configuration has said nothing.
        if self.trust_option or self.repo_option is not None or environment_path("CIUIC_REPO") is not None:
            return self.trust_option
        return self.config.trusts_repository

    def _say_if_foreign(self) -> None:
        from ciuic.repository.trust import foreign_flaw

        # -q, and completion, whose candidates are all that may be printed.
        flaw = None if self.verbosity < 0 else foreign_flaw(self.repository_dir)
        if flaw is not None and not self.trusts_repository:
            from ciuic.cli.shared.names import shown_text

            warn(
                f"another user may have written what is in this repository: the {shown_text(flaw.found)}",
                hint="it is read, and not written to",
            )

    @property
    def control(self) -> ControlClient:
        """The way to the daemon. Nothing is connected before the first call."""
        if self._control is None:
            from ciuic.protocol.control import ControlClient

            self._control = self._closing.enter_context(ControlClient(self._control_socket()))
        return self._control

    def _control_socket(self) -> Path:
        """The daemon's socket; ConfigError if the configuration is not valid and no daemon answers either.

        A daemon that runs goes on with the configuration that it read before, so that a typo in the file is no reason
        to leave it unasked: the file is warned of.
        """
        from ciuic.errors import ConfigError

        try:
            return self.config.control.socket
        except ConfigError as error:
            from ciuic.config.salvage import readable_part
            from ciuic.protocol.control import ControlClient

            socket = readable_part(self.config_option).control.socket
            # Without a daemon the mistake in the file is the reason for everything else, and the error to
            # show.
            if not ControlClient(socket).is_running():
                raise

            warn(
                f"the configuration is not valid, and the daemon goes on with what it read before:\n  {error.message}",
                hint=f"{error.hint or 'ciuic config check'}; until it is mended, the daemon cannot be started again",
            )
            return socket

    def _library_event(self, event: str, fields: Mapping[str, object]) -> None:
        """Print an event of the library to stderr for -v."""
        if self.verbosity > 0:
            from ciuic.cli.shared.names import shown_text

            words = " ".join(f"{key}={value}" for key, value in fields.items())
            complain(shown_text(f"{event} {words}"))

    def close(self) -> None:
        """Close everything that was opened. May be called twice."""
        self._closing.close()
        self._repository = self._control = None


def current() -> Session:
    """The session of the command that runs now."""
    return cast("Session", click.get_current_context().find_object(Session))


def environment_path(name: str) -> Path | None:
    """The absolute path in an environment variable; unset and empty mean the same."""
    value = os.environ.get(name, "")
    return Path(os.path.abspath(value)) if value else None
