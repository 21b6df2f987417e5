"""Watch of trainers: finds or registers them, and wires heartbeats, emergency snapshots and the alert hook.

    trainer ── watch.sock ──▶ WatchSocket ─▶ TrainerRegistry ─▶ Emergencies ─▶ snapshot, alert, event ─▶ AlertHook
    [[trainer]] ────────────▶ _TrainerFiles ─┘

Guarantees: an error here ends the watch of one trainer at most, never the daemon, and delays no job. For a
trainer that is killed there is an emergency snapshot of every root that can be cut, or a reason why not, and
`alert.command` is run. For a trainer that said goodbye there is neither.

A trainer registers on `watch.sock` with one message, gets one answer, and may close the connection. The kernel's
credentials of the caller decide, not its message: a caller whose trainers are not watched is refused before any
descriptor of its is received, and a caller that is neither root nor the owner of the registered process is refused
too. Descriptors of unprivileged callers are received by a process of its own (peer_server.py); only a pidfd and
pages come here, and are kept or closed.

Trainers of the configuration ([[trainer]]) are found by a pid file, a heartbeat file, or both. A pid file that
is older than the process with that pid is ignored; a heartbeat file counts from the moment in which it was
first seen to change, so that one left behind by an earlier run is no incident. A file that cannot be read,
because its disk hangs, delays no other trainer.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog
import trio

from ciuic.config import TrainerConfig
from ciuic.daemon.base.accounts import Accounts
from ciuic.daemon.base.alert_hook import AlertHook, Deliveries
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.peer_messages import ReceiverOptions
from ciuic.daemon.peer_server import PeerQuestion, PeerReply, PeerServer, close_all
from ciuic.daemon.roots.permission import WatchPermission, owners
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.trainers.registry import (
    MAX_INCIDENTS,
    Emergencies,
    ProcessIdentity,
    TrainerRegistry,
    WatchedTrainer,
    WatchJournal,
    read_journal,
    remove_journal,
    write_journal,
)
from ciuic.errors import Busy, CiuicError, NotFound, NotPermitted, UsageError
from ciuic.printable import escaped
from ciuic.protocol.control_types import Incident, SnapshotRequest, TrainerStatus
from ciuic.protocol.heartbeat_page import check_page
from ciuic.protocol.peer_socket import Caller, Refused
from ciuic.protocol.watch_client import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_CHARACTERS,
    SOCKET_NAME,
    Hello,
    Welcome,
)
from ciuic.structs import decode_msgpack
from ciuic.system import processes

# Connections, which trainers keep open. 512 trainers are watched at most, some with several managers.
MAX_CONNECTIONS: Final = 1024
_MAX_CONNECTIONS_OF_A_USER: Final = 256
log = structlog.get_logger(__name__)


async def _learn_nothing(uid: int) -> None:
    """Do nothing: for servers that show no names of users."""


class WatchSocket:
    """Server of the socket. `serve` is its task."""

    def __init__(
        self,
        runtime_dir: Path,
        trainers: TrainerRegistry,
        permitted: Callable[[Caller], bool],
        *,
        alerts: Alerts,
        owners: Callable[[], Iterable[int]] = tuple,
        learn_name: Callable[[int], Awaitable[None]] = _learn_nothing,
    ) -> None:
        """Prepare to listen.

        Args:
            runtime_dir: directory of the socket.
            trainers: where trainers are registered.
            permitted: whether the trainers of a caller are watched.
            alerts: where a receiver that ends is reported.
            owners: users that own roots, which have precedence over users without a trainer when there are
                too many connections.
            learn_name: looks up the name of a user for display.
        """
        self._trainers = trainers
        self._permitted = permitted
        self._learn_name = learn_name
        options = ReceiverOptions(
            path=str(runtime_dir / SOCKET_NAME),
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_connections=MAX_CONNECTIONS,
            max_connections_of_a_user=_MAX_CONNECTIONS_OF_A_USER,
            takes_descriptors=True,
        )
        self.server = PeerServer(
            options,
            self._answer,
            alerts=alerts,
            admit=self._refusal,
            known=lambda: {*owners(), *trainers.uids()},
        )

    async def serve(self) -> None:
        """Serve, until cancelled."""
        await self.server.serve()

    def _refusal(self, caller: Caller) -> bytes:
        if self._permitted(caller):
            return b""
        return _refused(_not_permitted(caller))

    async def _answer(self, question: PeerQuestion) -> PeerReply:
        """Take over or close every descriptor of the question."""
        try:
            if question.trouble:
                raise UsageError(question.trouble)
            identity, hello = self._checked(question)
            # Before the trainer is added, which is shown from then on: `user_name` asks no service.
            await self._learn_name(identity.uid)
            self._trainers.add(identity, question.fds[0], question.fds[1:], hello)
        except CiuicError as error:
            close_all(question.fds)
            return PeerReply(_refused(error))
        except BaseException:
            # On cancellation too the descriptors are this handler's to close.
            close_all(question.fds)
            raise
        return PeerReply(msgspec.msgpack.encode(Welcome()), keep=True)

    def _checked(self, question: PeerQuestion) -> tuple[ProcessIdentity, Hello]:
        """Return the process that the caller registers, and its message; raise UsageError and NotPermitted."""
        uid, fds = question.caller.uid, question.fds
        # Checked again: the configuration may have changed since the connection was admitted.
        if not self._permitted(question.caller):
            raise _not_permitted(question.caller)
        try:
            hello = decode_msgpack(question.data, Hello)
            texts = (hello.name, hello.where)
            if not hello.name or any(
                len(text) > MAX_TEXT_CHARACTERS or not text.isprintable() for text in texts
            ):
                raise UsageError(
                    f"name and where must be printable and at most {MAX_TEXT_CHARACTERS} characters long, and name not empty"
                )
            if not fds or not 0 <= hello.heartbeat_seconds < float("inf") or hello.kind == "file":
                raise UsageError("the message is no registration of a trainer")
            pid = processes.pid_of(fds[0])
            for page in fds[1:]:
                check_page(page)
        except (msgspec.DecodeError, ValueError, OSError) as error:
            raise UsageError(f"the message is no registration of a trainer: {error}") from error
        # The process has ended already, or is in another pid namespace: its pid is what the caller says.
        if pid <= 0:
            return ProcessIdentity(uid, hello.pid, hello.start_ticks), hello
        its_owner = processes.owner(pid)
        # -1: the process has been reaped since its pid was read, and has no owner any more.
        if uid not in (0, its_owner) and its_owner != -1:
            raise NotPermitted(f"process {pid} belongs to somebody else")
        return ProcessIdentity(
            its_owner if uid == 0 and its_owner >= 0 else uid, pid, processes.start_ticks(pid)
        ), hello


def _not_permitted(caller: Caller) -> NotPermitted:
    return NotPermitted(
        f"this daemon does not watch trainers of user {caller.uid}",
        hint="name the user in the daemon's configuration: [watch] users",
    )


def _refused(error: CiuicError) -> bytes:
    log.info("trainer_refused", reason=str(error))
    return msgspec.msgpack.encode(Refused.of(error))


_LOOK_SECONDS: Final = 1.0
# Tolerance of the comparison that a pid file is written after its process began: the two times come from
# different clocks.
_LATE_SECONDS: Final = 5.0


class _Found(NamedTuple):
    """Content of the files of one trainer."""

    pid: int = 0
    """Process id; 0: none, or of no live process."""
    beat_ns: int = 0
    """Modification time of the heartbeat file; 0: there is none."""


class _TrainerFiles:
    """Registers configured trainers. `run` is its task."""

    def __init__(self, trainers: TrainerRegistry, wanted: Callable[[], Iterable[TrainerConfig]]) -> None:
        self._trainers = trainers
        self._wanted = wanted
        self._watched: dict[TrainerConfig, WatchedTrainer] = {}
        self._looking: set[TrainerConfig] = set()
        # A limiter of its own: a look at a file on a disk that hangs keeps its thread.
        self._threads = trio.CapacityLimiter(64)

    async def run(self) -> None:
        """Look at all files once a second, until cancelled. Changes of the configuration take effect."""
        async with trio.open_nursery() as nursery:
            while True:
                wanted = list(self._wanted())
                for gone in [one for one in self._watched if one not in wanted]:
                    self._trainers.drop(self._watched.pop(gone))
                for one in wanted:
                    if one not in self._looking:
                        self._looking.add(one)
                        nursery.start_soon(self._look_at, one)
                await trio.sleep(_LOOK_SECONDS)

    async def _look_at(self, wanted: TrainerConfig) -> None:
        try:
            found = await trio.to_thread.run_sync(
                look_at, wanted, abandon_on_cancel=True, limiter=self._threads
            )
            self._follow(wanted, found)
        except Exception:
            log.exception("trainer_files_failed", trainer=wanted.name)
        finally:
            self._looking.discard(wanted)

    def _follow(self, wanted: TrainerConfig, found: _Found) -> None:
        known = self._watched.get(wanted)
        if known is not None and self._trainers.find(known.identity) is not known:
            known = None  # it has ended, and that was reported
        if known is None or (found.pid and known.identity.pid != found.pid):
            if known is not None and known.life < 0:
                self._trainers.drop(known)
            known = self._begin(wanted, found)
        if known is not None:
            known.file_beats = found.beat_ns
            known.present = bool(found.pid) or wanted.pid_file is None

    def _begin(self, wanted: TrainerConfig, found: _Found) -> WatchedTrainer | None:
        life, ticks = -1, 0
        if found.pid:
            try:
                life, ticks = processes.life_of(found.pid), processes.start_ticks(found.pid)
            except OSError:
                return None
        where = str(wanted.pid_file or wanted.heartbeat_file)
        # A trainer without a process gets an identity that no process has and that is unique.
        identity = (
            ProcessIdentity(max(0, processes.owner(found.pid)), found.pid, ticks)
            if found.pid
            else ProcessIdentity(0, 0, hash(wanted.name))
        )
        hello = Hello(
            name=wanted.name,
            where=where,
            kind="file",
            pid=found.pid,
            start_ticks=ticks,
            heartbeat_seconds=float(wanted.heartbeat_seconds),
        )
        here = bool(found.pid) or wanted.pid_file is None
        try:
            trainer = self._trainers.add(identity, life, [], hello, clears=here)
        except Busy as error:
            log.warning("trainer_refused", trainer=wanted.name, reason=str(error))
            if life >= 0:
                os.close(life)
            return None
        self._watched[wanted] = trainer
        trainer.pid_file = wanted.pid_file
        return trainer


def look_at(wanted: TrainerConfig) -> _Found:
    """Read the files of one trainer. Blocks as long as the disk does."""
    return _Found(
        0 if wanted.pid_file is None else _pid_in(wanted.pid_file),
        0 if wanted.heartbeat_file is None else _time_of(wanted.heartbeat_file),
    )


def _pid_in(path: Path) -> int:
    try:
        # O_NONBLOCK: a fifo in place of the file must not block the thread.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            text = file.read(32)
            written_seconds_ago = time.time() - os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno != errno.ENOENT:
            log.warning("pid_file_not_read", path=str(path), error=str(error))
        return 0
    words = text.split()
    # 1 is the init process, and no pid reaches 4,194,304 (proc_sys_kernel(5), pid_max).
    if not words or not words[0].isdigit() or not 1 < int(words[0]) < 1 << 22:
        return 0
    pid = int(words[0])
    age_seconds = processes.seconds_old(pid)
    if not processes.start_ticks(pid) or age_seconds < written_seconds_ago - _LATE_SECONDS:
        return 0  # another process has the pid by now
    return pid


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class TrainerWatch:
    """Watch of one daemon. `tell` is a task of the daemon's whole life, `run` of the time in which it works."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        accounts: Accounts,
        alerts: Alerts,
        events: EventBus,
        now_ns: Callable[[], int],
        as_service: bool,
        newest_snapshot: Callable[[int], str] = lambda before_ns: "",
    ) -> None:
        """Put the parts together.

        Args:
            settings: settings in force.
            take: cuts an emergency snapshot.
            roots: supervisors of the roots, by path.
            accounts: users that may register trainers, and names of users.
            alerts: where incidents are reported.
            events: bus that the alert command listens to.
            now_ns: wall clock.
            as_service: systemd-run is known to work, so the alert command is run as a service of its own.
            newest_snapshot: returns the newest snapshot if it is from before a time since boot, else nothing.
        """
        self._roots = roots
        self._accounts = accounts
        self._alerts = alerts
        self._events = events
        self._runtime_dir = settings().runtime_dir
        self._incidents: list[Incident] = []
        self._hook = AlertHook(
            lambda: settings().alert,
            os.uname().nodename,
            os.environ,
            service_directory=self._runtime_dir if as_service else None,
            on_refusal=self._alert_refused,
        )
        self._deliveries = Deliveries(
            lambda: settings().alert,
            os.uname().nodename,
            os.environ,
            alerts,
            service_directory=self._runtime_dir if as_service else None,
        )
        self._emergencies = Emergencies(
            take,
            alerts=alerts,
            events=events,
            now_ns=now_ns,
            per_hour=lambda: settings().watch.emergency_per_hour,
            on_incident=self._add,
        )
        self._is_stopped = False
        self._trainers = TrainerRegistry(
            alerts=alerts,
            emergencies=self._emergencies,
            now_ns=now_ns,
            on_change=self._note,
            silence=lambda: settings().watch.silence,
            newest_snapshot=newest_snapshot,
        )
        self._files = _TrainerFiles(self._trainers, lambda: settings().trainers)
        self._socket = WatchSocket(
            self._runtime_dir,
            self._trainers,
            lambda caller: self._permission()(caller),
            alerts=alerts,
            owners=self._owners,
            learn_name=accounts.learn_name,
        )

    async def tell(self) -> None:
        """Run the alert command and send messages for alerts and incidents, until the event bus is closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deliveries.run, self._events)
            nursery.start_soon(self._hook.run)
            await self._hook.follow(self._events)
            nursery.cancel_scope.cancel()

    async def run(self) -> None:
        """Watch trainers, until cancelled."""
        journal = await trio.to_thread.run_sync(read_journal, self._runtime_dir)
        self._incidents = journal.incidents[:MAX_INCIDENTS]
        self._emergencies.remember(self._incidents)
        try:
            async with trio.open_nursery() as nursery:
                self._trainers.nursery = nursery
                # Before the socket is served: a writer process that registers its trainer again finds it,
                # with the time since which it was watched.
                self._trainers.take_over(journal.trainers)
                nursery.start_soon(self._emergencies.run)
                nursery.start_soon(self._trainers.look)
                nursery.start_soon(self._files.run)
                nursery.start_soon(self._socket.serve)
                nursery.start_soon(self._accounts.learn_names, self._trainers.uids())
        finally:
            self._trainers.nursery = None
            # Before the descriptors are closed, which forgets the trainers.
            self._note()
            self._trainers.close()
            with suppress(OSError):
                (self._runtime_dir / SOCKET_NAME).unlink(missing_ok=True)

    def stopped(self, *, followed: bool) -> None:
        """End the watch.

        Args:
            followed: another daemon follows, and finds in the journal which trainers to watch.
        """
        if not followed:
            self._is_stopped = True
            remove_journal(self._runtime_dir)

    def statuses(self) -> list[TrainerStatus]:
        """Return the status of every watched trainer."""
        return self._trainers.statuses()

    def uids(self) -> set[int]:
        """Return the users with a watched trainer."""
        return self._trainers.uids()

    def incidents(self) -> list[Incident]:
        """Return the incidents, newest first."""
        return list(self._incidents)

    def forget(self, trainer: str) -> None:
        """Stop watching a trainer, by name or pid, clear its alerts and forget its incidents; raise NotFound where there is none."""
        kept = [
            one for one in self._incidents if trainer not in (one.trainer.name, escaped(one.trainer.name))
        ]
        # Of a training that is dead an alert may be gone, after a restart of the daemon, and the incident still be shown.
        had_incidents = len(kept) < len(self._incidents)
        self._incidents = kept
        if self._trainers.forget(trainer) or had_incidents:
            self._note()
        else:
            raise NotFound(
                f"no trainer {trainer} is watched, and no alert speaks of one", hint="see: ciuic status"
            )

    def _alert_refused(self, error: NotPermitted | None) -> None:
        if error is None:
            self._alerts.clear("alert-command")
        else:
            self._alerts.report("alert-command", error.message, hint=error.hint, severity="warning")

    def _owners(self) -> frozenset[int]:
        return owners(self._roots().values())

    def _permission(self) -> WatchPermission:
        accounts = self._accounts
        return WatchPermission(accounts.group_id, accounts.everybody, accounts.user_ids, self._owners())

    def _add(self, incident: Incident) -> None:
        self._incidents = [incident, *self._incidents][:MAX_INCIDENTS]
        self._note()

    def _note(self) -> None:
        if self._is_stopped:
            return  # `run` may end after this, when one of its threads is slow, and would leave a file behind
        journal = WatchJournal(trainers=self._trainers.records(), incidents=self._incidents)
        write_journal(self._runtime_dir, journal)
