"""``ciuic snapshot --set``: this host's part in a set of snapshots of one instant, and the start of the others' over ssh."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from ciuic.cli.shared.messages import shown
from ciuic.cli.shared.output import note
from ciuic.errors import CiuicError, Partial, UsageError

if TYPE_CHECKING:
    import subprocess
    from typing import IO

    from ciuic.protocol.control import ControlClient
    from ciuic.protocol.control_types import SnapshotRequest, SnapshotState
    from ciuic.remote.access import Remote
    from ciuic.remote.sets import SetRequest
    from ciuic.types import SetMember


class SetOptions(NamedTuple):
    """Options of the command, as they were given."""

    name: str
    hosts: str
    member: str
    hold_limit: str
    wait_for: str

    def request(self) -> SetRequest:
        """Return the request; raise UsageError where it cannot be meant."""
        from ciuic.protocol.control_types import MAX_HOLD_LIMIT_SECONDS
        from ciuic.remote.sets import DEFAULT_HOLD_LIMIT_SECONDS, DEFAULT_WAIT_SECONDS, SetRequest

        members = tuple(filter(None, (host.strip() for host in self.hosts.split(","))))
        if not members:
            raise UsageError("--set needs the hosts of the set", hint="--hosts a,b,c")
        limit_seconds = _seconds("--hold-limit", self.hold_limit, DEFAULT_HOLD_LIMIT_SECONDS)
        if not 0 < limit_seconds <= MAX_HOLD_LIMIT_SECONDS:
            raise UsageError(
                f"--hold-limit must be from 1s to {MAX_HOLD_LIMIT_SECONDS:g}s, got {self.hold_limit}"
            )
        # The name that snapshots have for this host.
        member = self.member or os.uname().nodename
        wait_seconds = _seconds("--wait-for", self.wait_for, DEFAULT_WAIT_SECONDS)
        request = SetRequest(self.name, members, member, limit_seconds, wait_seconds)
        request.check()
        return request


def _seconds(option: str, text: str, default: float) -> float:
    from ciuic.units import parse_duration

    try:
        return float(parse_duration(text)) if text else default
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


class _DaemonOfHost:
    """This host's daemon, for `ciuic.remote.sets`."""

    def __init__(self, control: ControlClient, snapshot: SnapshotRequest) -> None:
        self._control = control
        self._snapshot = snapshot
        self.place: SetMember | None = None

    def flush(self) -> bool:
        return self._control.flush(self._snapshot.roots).complete

    def hold(self, member: SetMember, limit_seconds: float, *, flushed: bool) -> _HoldOfHost:
        from ciuic.protocol.control_types import HoldRequest

        self.place = member
        request = HoldRequest(
            snapshot=self._snapshot, set_member=member, limit_seconds=limit_seconds, flushed=flushed
        )
        return _HoldOfHost(self._control, self._control.hold(request).token)


class _HoldOfHost:
    def __init__(self, control: ControlClient, token: str) -> None:
        self._control = control
        self._token = token

    def cut(self) -> SnapshotState:
        return self._control.cut_hold(self._token)

    def release(self) -> None:
        self._control.release_hold(self._token)


def take_of_set(
    control: ControlClient, remote: Remote, request: SetRequest, snapshot: SnapshotRequest
) -> tuple[SnapshotState, SetMember]:
    """Cut this host's snapshot of the set; return its state and its place.

    Raises:
        CiuicError: as `ciuic.remote.sets.SetMeeting.take`.
    """
    from ciuic.remote.sets import SetMeeting

    meeting = SetMeeting(remote.objects, remote.sealer, request)
    daemon = _DaemonOfHost(control, snapshot)
    try:
        state = meeting.take(daemon)
    except KeyboardInterrupt:
        meeting.give_up()
        raise
    assert daemon.place is not None
    return state, daemon.place


# Shown of what a host that failed has said; its last words say why.
_MAX_LINES = 10
_MAX_SAID_BYTES = 64 << 10
_CUT_SECONDS = 60.0
_COMMIT_SECONDS = 3600.0
"""Longest wait for the others after this host is done: for their ends, and for captures that may be larger than its own."""


class _Said:
    """The end of what a pipe says, read by a thread, so that a host fills neither the memory nor the pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        import threading

        self._pipe = pipe
        self._end = bytearray()
        self._thread = threading.Thread(target=self._read, name="ssh output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while part := os.read(self._pipe.fileno(), _MAX_SAID_BYTES):
                self._end += part
                del self._end[:-_MAX_SAID_BYTES]

    def text(self) -> bytes:
        """Return what was said, soon after the end of the process; others may keep the pipe open (ControlPersist)."""
        self._thread.join(1)
        return bytes(self._end).strip()


class OtherHosts:
    """The same command on the other hosts of a set, started over ssh; a context manager, which starts them.

    Args:
        members: all members of the set, which ssh finds by these names.
        member: the one that this host is.
        words: options of the command, but for ``--member``.
        waits: the command ends once its snapshot is stored, not once it is cut.
        environment: environment of ssh.
    """

    def __init__(
        self,
        members: Sequence[str],
        member: str,
        words: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        *,
        waits: bool = False,
    ) -> None:
        from ciuic.remote.objects.ssh_objects import COMMAND_VARIABLE, PROGRAM_VARIABLE, SSH_OPTIONS

        self._environment = environment
        self._ssh = [*shlex.split(environment.get(COMMAND_VARIABLE, "") or "ssh"), *SSH_OPTIONS]
        program = environment.get(PROGRAM_VARIABLE, "") or "ciuic"
        self._commands = {
            other: f"{program} {shlex.join(['snapshot', *words, '--member', other])}"
            for other in members
            if other != member
        }
        self._limit_seconds = _COMMIT_SECONDS if waits else _CUT_SECONDS
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._said: dict[str, tuple[_Said, _Said]] = {}

    def __enter__(self) -> OtherHosts:
        # Imported here: 7 ms, which snapshots of one host do not pay.
        import subprocess

        from ciuic.system.child_process import without_secrets

        try:
            for host, command in self._commands.items():
                # `--`, because a host whose name begins with a dash would be an option of ssh.
                self._started[host] = process = subprocess.Popen(
                    [*self._ssh, "-o", "BatchMode=yes", "--", host, command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env=without_secrets(self._environment),
                )
                assert process.stdout is not None
                assert process.stderr is not None
                self._said[host] = _Said(process.stdout), _Said(process.stderr)
        except OSError as error:
            self._end()
            raise UsageError(f"{self._ssh[0]} cannot be started: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CiuicError) and not isinstance(error, Partial):
            # Why a host did not come is what its ssh said, not what this host knows.
            for host, process in self._started.items():
                if process.poll():
                    self._tell(host)
        self._end()

    def finish(self) -> None:
        """Wait for all, and print their ids to stderr, or what they said.

        Raises:
            Partial: a command failed, or did not end in time; the set is incomplete, or not committed everywhere.
        """
        import subprocess

        failed = []
        deadline = time.monotonic() + self._limit_seconds
        for host, process in self._started.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                failed.append(f"{host} (no end within {self._limit_seconds:.0f} s)")
                continue
            if code:
                self._tell(host)
                failed.append(f"{host} (exit code {code})")
            else:
                note(f"{host}: {shown(self._said[host][0].text())}")
        if failed:
            raise Partial(
                f"other hosts failed: {', '.join(failed)}", hint="the set may be incomplete: cut another one"
            )

    def _tell(self, host: str) -> None:
        for line in self._said[host][1].text().splitlines()[-_MAX_LINES:]:
            note(f"{host}: {shown(line)}")

    def _end(self) -> None:
        """End what still runs; a host that is left takes part, or gives up, by itself."""
        for process in self._started.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()
