"""State of one run of the program: global options, and the configuration, repository and daemon that they lead to.

Guarantees: nothing is read before a command asks for it, so ``--repo`` works without any configuration file and a broken
one stops only the commands that need it. Leaves the meaning of the configuration to ``ciuic.config``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Final, cast

import click

from ciuic.cli.shared.messages import complain, shown_text, warn
from ciuic.units import plural

if TYPE_CHECKING:
    from pathlib import Path

    from ciuic.cli.shared.remotes import EveryVersion
    from ciuic.config import Config
    from ciuic.errors import CiuicError
    from ciuic.protocol.control import ControlClient
    from ciuic.remote.reading.opening import ReadableRemote
    from ciuic.repository import Repository
    from ciuic.repository.snapshots import CommittedSnapshots
    from ciuic.types import SnapshotId


# Long enough for a snapshot of few changes; a first capture may take hours, and Busy (75) names who has the
# lock.
LOCK_WAIT_SECONDS: Final = 10.0
URL_MARK: Final = "://"
"""Mark that tells the URL of a remote from a directory."""


class Session:
    """State of one run."""

    # No dataclass: that module and the methods that it would compile for this class take 5 ms of processor time, of
    # each command. The parameters are what callers give; everything else is found out during the run.
    def __init__(
        self,
        *,
        config_option: Path | None = None,
        repo_option: Path | None = None,
        remote_option: str | None = None,
        as_host: str | None = None,
        trust_option: bool = False,
        ignores_environment: bool = False,
        may_ask: bool = True,
        verbosity: int = 0,
        json: bool = False,
        printed_json: bool = False,
        now_ns: int | None = None,
    ) -> None:
        """Begin a run that has opened nothing yet. ``now_ns``: its time, which a test can hold still; None: now."""
        self.config_option = config_option
        self.repo_option = repo_option
        self.remote_option = remote_option
        """URL of a remote, given with --repo."""
        self.as_host = as_host
        """Host whose snapshots are read from a remote; None for those of all."""
        self.behind_deletions = False
        """--behind-deletions was given: of a remote all versions are read."""
        self.all_claims = False
        """--all-claims was given: of a remote what logs gave up is read as well."""
        self.stored_before: str | None = None
        """Text of --stored-before: of a remote only what was stored before this time is read."""
        self.trust_option = trust_option
        """--trust-repository was given: the repository may belong to another user."""
        self.ignores_environment = ignores_environment
        """CIUIC_REPO is not read: it names the remote that another session reads."""
        self.may_ask = may_ask
        """False while words are completed: no key may be asked for."""
        self.verbosity = verbosity
        """-1 quiet, 0, 1 verbose, 2 with tracebacks."""
        self.json = json
        """--json was given: a failure, too, is reported as one document on stdout."""
        self.printed_json = printed_json
        """The document is out: a failure after it must not print a second one."""
        self.stdout_gone = False
        """The reader of stdout has left: nothing more is printed, and the exit code still counts."""
        self.now_ns = time.time_ns() if now_ns is None else now_ns
        self.exit_code = 0
        """Exit code of a command that does what it was asked for, where something of it could not be read."""
        self._config: Config | None = None
        self._repository: Repository | None = None
        self._remote: ReadableRemote | None = None
        self._control: ControlClient | None = None
        self._closing = ExitStack()

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

    @cached_property
    def checkpoint_patterns(self) -> tuple[str, ...]:
        """Patterns of what is one checkpoint each, from the valid part of the configuration."""
        from ciuic.config.load import readable_part

        # A mistake elsewhere in the file must not hide the checkpoints of a repository that is named.
        config = self._config if self._config is not None else readable_part(self.config_option)
        return config.checkpoint_patterns

    @property
    def repository_dir(self) -> Path:
        """--repo, CIUIC_REPO, or what the configuration says; UsageError where none of them says anything."""
        if self.remote_url is not None:
            from ciuic.errors import UsageError

            raise UsageError(
                "this needs a repository on this host, and --repo names a remote",
                hint="list, show, diff, verify, restore and export read a remote; prune, forget and check work on one",
            )
        # Before the configuration, which is not read then: a rescue must work where it is missing or broken.
        given = self.repo_option or self._named_by_environment()
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
        from ciuic.config.load import readable_part
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
            from ciuic.repository import Repository

            # Before it is opened, because opening may log.
            self.take_events()
            self._repository = self._closing.enter_context(Repository.open(self.repository_dir))
            self._say_if_foreign()
        return self._repository

    @property
    def remote_url(self) -> str | None:
        """URL of the remote that is read instead of a repository; None where none is named."""
        if self.remote_option is not None or self.repo_option is not None:
            return self.remote_option
        named = "" if self.ignores_environment else os.environ.get("CIUIC_REPO", "")
        return named if URL_MARK in named else None

    @property
    def names_repository(self) -> bool:
        """True if the repository or remote was named, and is not that of the configuration."""
        return self.remote_url is not None or (self.repo_option or self._named_by_environment()) is not None

    @property
    def place(self) -> str:
        """The repository's directory, or the remote's URL."""
        return self.remote_url or str(self.repository_dir)

    @property
    def every_version(self) -> EveryVersion | None:
        """Request of --behind-deletions and --stored-before; None where they were not given."""
        if not self.behind_deletions and self.stored_before is None:
            return None
        from ciuic.cli.shared.remotes import EveryVersion
        from ciuic.cli.shared.times import parse_when

        before_ns = None if self.stored_before is None else parse_when(self.stored_before, self.now_ns)
        return EveryVersion(before_ns)

    @property
    def remote(self) -> ReadableRemote:
        """The remote that is read, open until the run ends."""
        if self._remote is None:
            from ciuic.cli.shared.remotes import open_named_remote

            assert self.remote_url is not None
            self.take_events()
            opened = self._closing.enter_context(
                open_named_remote(
                    self.remote_url,
                    lambda: self.config.remotes,
                    self.every_version,
                    all_claims=self.all_claims,
                    may_ask=self.may_ask,
                )
            )
            self._say_if_damaged(opened)
            self._remote = opened if self.as_host is None else opened.of_host(self.as_host)
        return self._remote

    def narrow_remote(self, choose: Callable[[ReadableRemote], ReadableRemote]) -> None:
        """Read, from now on, what ``choose`` returns for the remote."""
        self._remote = choose(self.remote)

    def _say_if_damaged(self, opened: ReadableRemote) -> None:
        # A copy of a log below another name is damaged in each of its entries.
        for _, some in groupby(opened.log_damage, key=lambda one: one.name.rpartition("/")[0]):
            damage, *more = some
            others = f" (and so {plural(len(more), 'other')} beside it)" if more else ""
            warn(
                f"{damage.message}{others}; the snapshot of a lost commit is not shown",
                hint="ciuic check --remote --repair",
            )
            self.exit_code = damage.exit_code
        self.say_damaged(opened.lost_spaces)
        for host, count in opened.suddenly_given_up.items():
            warn(
                f"the newest snapshots of {host} were all given up; {plural(count, 'snapshot')} that no collection has deleted "
                "are not shown",
                hint="ciuic list --all-claims; if nobody meant it, somebody has the key of a host",
            )

    def say_damaged(self, damages: Iterable[CiuicError]) -> None:
        """Warn of damage, and end with its exit code unless the command ends with another one."""
        for damage in damages:
            warn(damage.message, hint=damage.hint)
            self.exit_code = damage.exit_code

    @property
    def snapshots(self) -> CommittedSnapshots:
        """The snapshots of the repository, or of the remote."""
        if self.remote_url is not None:
            return self.remote.snapshots
        for option, given in (
            ("--as-host", self.as_host is not None),
            ("--behind-deletions", self.behind_deletions),
            ("--stored-before", self.stored_before is not None),
            ("--all-claims", self.all_claims),
        ):
            if given:
                from ciuic.errors import UsageError

                raise UsageError(f"{option} goes with the URL of a remote: --repo s3://…")
        return self.repository.snapshots

    @property
    def repositories(self) -> Sequence[Repository]:
        """All repositories that the snapshots are in: one, unless a remote has some with an identity of their own."""
        return [self.repository] if self.remote_url is None else self.remote.repositories

    def repository_of(self, *ids: SnapshotId) -> Repository:
        """Return the repository that has these snapshots; UsageError where they are in several."""
        return self.repository if self.remote_url is None else self.remote.repository_of(ids)

    @property
    def local(self) -> Session:
        """A session for the repository of this host; this one, unless a remote is read."""
        if self.remote_url is None:
            return self
        session = Session(
            config_option=self.config_option,
            ignores_environment=True,
            verbosity=self.verbosity,
            now_ns=self.now_ns,
        )
        self._closing.callback(session.close)
        return session

    @property
    def own_repository(self) -> Repository:
        """The same, to be written to. ForeignRepository where root was not told to write into another user's."""
        from ciuic.repository.trust import require_own

        require_own(self.repository_dir, trusted=self.trusts_repository)
        return self.repository

    def require_trust(self, host: str | None = None) -> None:
        """Raise NotPermitted where root would run programs that others may have written into the repository.

        Args:
            host: Host of the snapshot, which must be this one; None: any.
        """
        from socket import gethostname

        from ciuic.errors import NotPermitted
        from ciuic.repository.trust import foreign_flaw

        if os.geteuid() != 0 or self.trusts_repository:
            return
        if self.remote_url is not None:
            reason = "other hosts may write into the remote"
        elif (flaw := foreign_flaw(self.repository_dir)) is not None:
            reason = f"another user may have written what is in this repository: the {shown_text(flaw.found)}"
        elif host not in (None, gethostname()):
            reason = f"the snapshot is of another host, {shown_text(host)}"
        else:
            return
        raise NotPermitted(
            f"{reason}; root would run it",
            hint="if you trust them: ciuic --trust-repository …; ciuic mount shows snapshots beside",
        )

    @property
    def trusts_repository(self) -> bool:
        """Return True if the repository may belong to another user. The configuration speaks only of the repository that it names."""
        # --repo names a repository of which the configuration has said nothing.
        if self.trust_option or self.repo_option is not None or self.remote_url is not None:
            return self.trust_option
        if self._named_by_environment() is not None:
            return False
        return self.config.trusts_repository

    def _named_by_environment(self) -> Path | None:
        return None if self.ignores_environment else _environment_path("CIUIC_REPO")

    def _say_if_foreign(self) -> None:
        from ciuic.repository.trust import foreign_flaw

        # -q, and completion, whose candidates are all that may be printed.
        flaw = None if self.verbosity < 0 else foreign_flaw(self.repository_dir)
        if flaw is not None and not self.trusts_repository:
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
            from ciuic.config.load import readable_part
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

    def take_events(self) -> None:
        """Have the library's events printed; without a sink they would go to stdout, which is for results."""
        from ciuic.repository import log

        log.sink = self._library_event
        self._closing.callback(setattr, log, "sink", None)

    def _library_event(self, event: str, fields: Mapping[str, object]) -> None:
        """Print an event of the library to stderr for -v."""
        if self.verbosity > 0:
            words = " ".join(f"{key}={value}" for key, value in fields.items())
            complain(shown_text(f"{event} {words}"))

    def close(self) -> None:
        """Close everything that was opened. May be called twice."""
        self._closing.close()
        self._repository = self._control = self._remote = None


def current() -> Session:
    """The session of the command that runs now."""
    return cast("Session", click.get_current_context().find_object(Session))


def _environment_path(name: str) -> Path | None:
    """The absolute path in an environment variable; unset and empty mean the same."""
    from pathlib import Path

    value = os.environ.get(name, "")
    return Path(os.path.abspath(value)) if value else None
