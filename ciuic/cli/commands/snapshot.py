"""``ciuic snapshot``: asks the daemon for a snapshot now.

Guarantees: the id, alone on stdout, is printed once the instant is fixed; with ``--wait`` once the snapshot is durable, and
exit code 8 says that it lacks roots; with ``--wait=remote`` once every configured remote has committed it, too.
Interrupting the wait interrupts nothing else: the capture goes on in the daemon.

A remote counts as done only when the record of the process that uploads names the snapshot as stored, which is written after the
remote's commit.

With ``--set`` it is this host's part in a set of snapshots of one instant, and the start of the others' over ssh.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from ciuic.cli.shared.messages import complain, plural, shown, shown_text, warn
from ciuic.cli.shared.options import FrameCommand, Tag, Text
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.cli.shared.snapshot_command import OPTIONS, reason_of, telling_why
from ciuic.errors import CiuicError, NotFound, Partial, UsageError, error_of
from ciuic.units import human_duration

if TYPE_CHECKING:
    import subprocess
    from typing import IO

    from ciuic.cli.shared.progress import Reporter
    from ciuic.protocol.control import ControlClient
    from ciuic.protocol.control_types import SnapshotRequest, SnapshotState
    from ciuic.remote.access import Remote
    from ciuic.remote.sets import SetRequest
    from ciuic.remote.upload_status import UploadStatus
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


_POLL_SECONDS: Final = 0.2
# Time after which it is said that nothing uploads, or what the upload waits for.
_PATIENCE_SECONDS: Final = 5.0
_UNSERVED_SECONDS: Final = 60.0
"""Longer than systemd takes to start a service again."""
_UPLOAD_HINT: Final = "ciuic remote upload, or ciuic service install"


class RemoteWait:
    """Wait for the configured remotes; made before the snapshot is taken, so that what is missing is said first."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names = [remote.name for remote in session.config.remotes]
        if not self._names:
            raise NotFound("no remote is configured to wait for", hint="ciuic remote init URL makes one")

    def until_stored(self, snapshot_id: str) -> None:
        """Return when every remote has committed the snapshot.

        Raises:
            CiuicError: a remote does not want it, or nothing has uploaded to one for a minute.
        """
        try:
            began = served = time.monotonic()
            told = False
            repository = self._session.repository.id
            for name in self._names:
                while not _is_stored(name, repository, snapshot_id):
                    now = time.monotonic()
                    if now - began > _PATIENCE_SECONDS:
                        status = _upload_status(name)
                        if not told:
                            told = True
                            _tell(name, status)
                        if status is not None and status.runs:
                            served = now
                        elif now - served > _UNSERVED_SECONDS:
                            raise CiuicError(
                                f"{snapshot_id} is committed on this host; nothing uploads to the remote {name}",
                                hint=_UPLOAD_HINT,
                            )
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            complain(f"{snapshot_id} is committed on this host; what uploads goes on")
            raise

    def until_end(self, snapshot_id: str, deadline: float) -> list[str]:
        """Return when every remote has committed the snapshot or will not before this machine ends.

        Args:
            snapshot_id: Snapshot, which may not be committed on this host yet.
            deadline: End of this machine on the monotonic clock.

        Returns:
            A sentence for each remote that lacks it.
        """
        repository = self._session.repository.id
        late: dict[str, str] = {}
        waiting = list(self._names)
        while waiting:
            for name in list(waiting):
                try:
                    if _is_stored(name, repository, snapshot_id):
                        waiting.remove(name)
                        late.pop(name, None)
                        continue
                    late[name] = _left_out(name, snapshot_id)
                except CiuicError as error:
                    late[name] = error.message
                if late[name]:
                    waiting.remove(name)
            if not waiting or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        late |= dict.fromkeys(waiting, "not stored when the time was over")
        return [f"remote {name}: {shown_text(why)}" for name, why in late.items() if why]


def _left_out(name: str, snapshot_id: str) -> str:
    """Return why an upload does not begin this snapshot before this machine ends; empty if it may come."""
    status = _upload_status(name)
    forecast = status.forecast if status is not None else None
    if forecast is None or forecast.by_seconds <= time.monotonic():
        return ""
    return next(
        (
            f"left out, because it would need {human_duration(one.needed_seconds or 0.0)}"
            for one in forecast.states
            if one.newest == snapshot_id and one.outcome == "left out"
        ),
        "",
    )


def _is_stored(name: str, repository: str, snapshot_id: str) -> bool:
    from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_record

    try:
        record = read_record(name)
    except StoredRecordDamaged as error:
        raise CiuicError(
            f"{snapshot_id} is committed on this host; what the remote {name} has stored cannot be read: {error}"
        ) from None
    # Ids are short: another repository, which was uploaded before this one, may have the same.
    if record is None or record.repository != repository:
        return False
    if snapshot_id in record.stored:
        return True
    if snapshot_id in record.passed_over:
        raise CiuicError(
            f"{snapshot_id} is committed on this host, and does not go to the remote {name}",
            hint="its schedule or retention leaves the snapshot out: ciuic config show",
        )
    return False


def _upload_status(name: str) -> UploadStatus | None:
    from ciuic.protocol.stored_remotely import upload_state_dir
    from ciuic.remote.upload_status import read_status

    return read_status(name, upload_state_dir())


def _tell(name: str, status: UploadStatus | None) -> None:
    """Say why a remote may take long."""
    if status is None or not status.runs:
        warn(f"nothing seems to upload to the remote {name}", hint=_UPLOAD_HINT)
    elif status.waits_for:
        warn(f"the upload to the remote {name} waits: {shown_text(status.waits_for)}")


# Only for progress that somebody sees; the wait of a script ends with the commit (`_await_commit`).


def _snapshot_options(command: Callable[..., Any]) -> Callable[..., Any]:
    # A decorator puts its option before those that are there.
    for option in reversed(OPTIONS):
        if option.values:
            add = click.option(
                *option.names, option.field, type=click.Choice(option.values), is_flag=False,
                flag_value=option.values[0], default=None, help=option.help,
            )  # fmt: skip
        elif option.is_flag:
            add = click.option(*option.names, option.field, is_flag=True, help=option.help)
        else:
            add = click.option(
                *option.names, option.field, multiple=option.repeats, default=None if option.repeats else "",
                type=Tag() if option.repeats else Text(), metavar=option.metavar, help=option.help,
            )  # fmt: skip
        command = add(command)
    return command


def _end_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a machine that ends, which only the whole program knows (fast_snapshot.py)."""
    cause = click.option(
        "--cause", type=Text(), default="", metavar="TEXT", help="What ends it; default of --message."
    )
    return click.option(
        "--before-end",
        type=Text(),
        default="",
        metavar="DURATION",
        help="This machine ends in this time: capture and upload make way for nobody, and --wait waits until then.",
    )(cause(command))


def _set_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a set of hosts, which only the whole program knows (fast_snapshot.py)."""
    for option, metavar, text in reversed(
        (
            ("--set", "NAME", "Cut this host together with others, at one instant; run it on each of them."),
            ("--hosts", "A,B,…", "The hosts of the set, by the names that snapshots have for them."),
            ("--member", "HOST", "The one of --hosts that this host is; default: its name."),
            (
                "--meet-at",
                "REMOTE",
                "The remote over which the hosts agree; default: the one that is configured.",
            ),
            ("--wait-for", "DURATION", "Longest wait for the other hosts, which holds nobody; default: 60s."),
            ("--hold-limit", "DURATION", "Longest time for which programs on a host are held; default: 2s."),
        )
    ):
        field = "set_name" if option == "--set" else option.lstrip("-").replace("-", "_")
        add = click.option(option, field, default="", type=Text(), metavar=metavar, help=text)
        command = add(command)
    return click.option("--ssh", is_flag=True, help="Run it on the other --hosts, too, over ssh.")(command)


@click.command("snapshot", cls=FrameCommand)
@_snapshot_options
@_end_options
@_set_options
@json_option
def command(
    message: str,
    tags: tuple[str, ...],
    hold: bool,
    wait: str | None,
    before_end: str,
    cause: str,
    set_name: str,
    hosts: str,
    member: str,
    meet_at: str,
    wait_for: str,
    hold_limit: str,
    ssh: bool,
    as_json: bool,
) -> None:
    """Take a snapshot now and print its id.

    Everything whose write() had returned when this command began is in it. Commands that wait for the same are answered by one
    snapshot.

    With --before-end it is for the hooks of schedulers that take a machine away: exit code 8 tells what was not stored in time.

    With --set the same command runs on every host of --hosts, and all are cut at one instant.
    """
    session = current()
    remotes = RemoteWait(session) if wait == "remote" else None
    if before_end or cause:
        if set_name or not before_end:
            raise UsageError(
                "--before-end is for one host" if set_name else "--cause is for a machine that ends",
                hint="leave --set out" if set_name else "--before-end says when it ends",
            )
        _take_before_end(session, before_end, cause, message, tags, wait, remotes, hold=hold, as_json=as_json)
        return
    if not set_name:
        if given := [
            word for word in (hosts, member, meet_at, wait_for, hold_limit, "--ssh" if ssh else "") if word
        ]:
            raise UsageError(f"{shown_text(given[0])!r} is for a set of hosts", hint="--set NAME names it")
        state = session.control.take_snapshot(message=message, tags=tags, hold=hold)
        _report_outcome(session, state, None, wait, remotes, as_json=as_json)
        return
    options = SetOptions(set_name, hosts, member, hold_limit, wait_for)
    request = options.request()
    words = _words(
        {
            "--set": set_name, "--hosts": hosts, "--meet-at": meet_at, "--wait-for": wait_for,
            "--hold-limit": hold_limit, "--message": message,
        },
        tags, wait, hold=hold,
    )  # fmt: skip
    with OtherHosts(request.members if ssh else (), request.member, words, waits=wait is not None) as others:
        state, place = _take_of_set(session, request, meet_at, message, tags, hold)
        _report_outcome(session, state, place, wait, remotes, as_json=as_json)
        others.finish()


def _take_before_end(
    session: Session,
    before_end: str,
    cause: str,
    message: str,
    tags: tuple[str, ...],
    wait: str | None,
    remotes: RemoteWait | None,
    *,
    hold: bool,
    as_json: bool,
) -> None:
    """Take a snapshot of a machine that ends, and wait as far as that is wanted, but not beyond its end."""
    from ciuic.units import parse_duration

    try:
        seconds = parse_duration(before_end)
    except ValueError as error:
        raise UsageError(f"--before-end: {error}") from None
    if not seconds:
        raise UsageError("--before-end must be at least 1s")
    deadline = time.monotonic() + seconds
    state = session.control.take_snapshot(
        message=message, tags=tags, hold=hold, before_end_seconds=seconds, cause=cause
    )
    late: list[str] = []
    try:
        while wait is not None and state.state not in ("committed", "failed"):
            if time.monotonic() >= deadline:
                late.append("it is not committed on this host")
                break
            time.sleep(_POLL_SECONDS)
            state = session.control.snapshot_state(state.id)
        if state.state == "failed":
            raise _failure_of(state)
        if remotes is not None:
            late += remotes.until_end(state.id, deadline)
    except KeyboardInterrupt:
        complain(f"{state.id} is cut, and the daemon goes on capturing it")
        raise
    _report_outcome(session, state, None, None, None, as_json=as_json, waited=wait is not None)
    if late:
        raise Partial(f"{state.id} was not stored everywhere in time: {'; '.join(late)}")


def _words(options: Mapping[str, str], tags: Sequence[str], wait: str | None, *, hold: bool) -> list[str]:
    """Return options of this command as words."""
    words = [f"{name}={value}" for name, value in options.items() if value]
    words += [f"--tag={tag}" for tag in tags]
    return [*words, *(["--hold"] if hold else []), *([f"--wait={wait}"] if wait is not None else [])]


def _report_outcome(
    session: Session,
    state: SnapshotState,
    place: SetMember | None,
    wait: str | None,
    remotes: RemoteWait | None,
    *,
    as_json: bool,
    waited: bool = False,
) -> None:
    """Wait for the snapshot as far as that is wanted, and print what became of it; ``waited`` tells of a wait before."""
    # Asked without wait, so that the id is known, and printed should the wait be interrupted.
    if wait is not None:
        state = _await_commit(session, state.id)
    if remotes is not None:
        remotes.until_stored(state.id)
    if as_json:
        import msgspec

        # An older daemon does not send the field.
        state.is_incomplete = bool(state.incomplete)
        document = msgspec.to_builtins(state)
        if place is not None:
            from ciuic.cli.shared.sets import set_document

            document["set"] = set_document(place)
        out_json(document)
    else:
        out(state.id)
        if wait is None and not waited:
            note(f"{state.id} is cut and being captured; `ciuic status` shows how far it is")
    # After the id: a script that reads it has it, whatever the exit code is.
    tell_what_is_missing(state.id, state.incomplete, state.left_out, waited=waited or wait is not None)


def _take_of_set(
    session: Session, request: SetRequest, meet_at: str, message: str, tags: tuple[str, ...], hold: bool
) -> tuple[SnapshotState, SetMember]:
    """Cut this host's snapshot of a set."""
    from ciuic.cli.commands.remote.targets import find_remote, opened
    from ciuic.protocol.control_types import SnapshotRequest
    from ciuic.remote.access import configured_objects

    config = find_remote(session.config, meet_at)
    objects = configured_objects(config)
    try:
        snapshot = SnapshotRequest(message=message, tags=list(tags), hold=hold)
        return take_of_set(session.control, opened(config, objects), request, snapshot)
    finally:
        objects.close()


def tell_what_is_missing(
    snapshot_id: str, incomplete: Sequence[str], left_out: Mapping[str, str], *, waited: bool
) -> None:
    """Warn of what the snapshot lacks. Raises Partial if roots are missing and the command waited for the commit."""
    if incomplete:
        _warn_incomplete(snapshot_id, incomplete)
    if not left_out:
        return
    roots = "; ".join(f"{shown_text(root)}: {shown_text(reason)}" for root, reason in left_out.items())
    if waited:
        raise Partial(
            f"{snapshot_id} is committed and partial, without {roots}",
            hint="the last snapshot that has them is kept; ciuic status says what the daemon does about it",
        )
    warn(f"{snapshot_id} is partial, without {roots}")


def _warn_incomplete(snapshot_id: str, lines: Sequence[str]) -> None:
    """Warn of files that could not be read."""
    warn(f"{snapshot_id} is incomplete: {plural(len(lines), 'file')} could not be read")
    for line in lines[:20]:
        complain(f"  {line}")


def _await_commit(session: Session, snapshot_id: str) -> SnapshotState:
    """Show the capture's progress until the snapshot is committed; raise what it failed with."""
    from ciuic.cli.shared.progress import progress

    try:
        with progress(f"capture {snapshot_id}") as reporter:
            while True:
                # Where nobody looks at the progress, the answer comes with the commit, not with the next poll
                # after it.
                if reporter.shows:
                    state = session.control.snapshot_state(snapshot_id)
                else:
                    with telling_why(str(session.control.socket)):
                        state = session.control.wait_snapshot(snapshot_id)
                if state.state == "failed":
                    raise _failure_of(state)
                if state.state == "committed":
                    return state
                _report(reporter, state)
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        complain(f"{snapshot_id} is cut, and the daemon goes on capturing it")
        raise


def _failure_of(state: SnapshotState) -> CiuicError:
    """The error that a failed snapshot carries."""
    return error_of(state.code, f"{state.id} was not committed: {state.error}", hint=state.hint)


def _report(reporter: Reporter, state: SnapshotState) -> None:
    done = state.progress
    # Without progress it waits for its turn.
    if done is None and state.seconds_left is not None:
        reporter.update(seconds_left=state.seconds_left)
    elif done is not None:
        reporter.update(
            bytes_done=done.bytes_done,
            bytes_total=done.bytes_total,
            files_done=done.files_done,
            files_total=done.files_total,
            seconds_left=state.seconds_left,
            reason=reason_of(state),
            path=done.path.encode("utf-8", "surrogateescape"),
        )
