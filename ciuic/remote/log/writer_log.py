"""Log of this host in a remote: say hello, commit snapshots, remove them, and remember where it ends.

Create-only orders every entry against the fences that collectors put into the same log. An entry is created at the
first free number only, by a party that has read all entries before it. What a fence condemns therefore counts as
not stored before the next commit can be created.

After an entry was created, the entry before it is read once more. Collectors delete a log's entries one at a time,
ascending, so that it is still there unless the new name had been deleted and was free for that reason alone: the
log has gone on without this process, which then takes a new name.

The name of the log and the number of its next entry are kept in a local file (`WriterState`): after `WriterState.save`
returned, a bucket whose log is shorter is noticed, also after a power cut.

References:
    docs/remote-format.md, section 6
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from ciuic.errors import UsageError
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.documents import (
    GivenUp,
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogMove,
    LogRemove,
    LogRetired,
    LogState,
    create_entry,
    read_entry,
)
from ciuic.remote.format.names import HexId, Number, log_entry_name, log_prefix, new_hex_id, parse_log_entry
from ciuic.remote.log.errors import missing_object_error
from ciuic.remote.log.rounds import Rounds
from ciuic.remote.objects.model import NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log
from ciuic.repository.disk import Disk, open_regular
from ciuic.repository.errors import UnsupportedFormat

_MAX_BYTES: Final = 4096


class WriterPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Log of this host, up to the entry before ``next``."""

    writer: HexId
    next: Number


class WriterState:
    """File with the `WriterPosition`; ``path`` is in a directory of the caller's own."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk or Disk()

    def load(self) -> WriterPosition | None:
        """Return what was saved; None if there is nothing, or nothing readable."""
        try:
            fd = open_regular(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        try:
            return msgspec.json.decode(data, type=WriterPosition)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # Without the file the host takes a new name, which is always allowed.
            log.warning("remote_writer_state_unreadable", path=self._path, error=str(error))
            return None

    def save(self, position: WriterPosition) -> None:
        """Replace what was saved; durable on return."""
        self._disk.replace_file(self._path, msgspec.json.encode(position))


class WriterLog:
    """Log of one uploader, collector or operator. May be used by several threads at once.

    Every method may raise RemoteUnreachable: calling it again with the same arguments continues, and finds out
    whether the lost request was carried out. Damaged remotes raise DamagedRemote.

    Args:
        objects: The remote.
        sealer: Its seals.
        state: Name and end of the log, kept on this host.
        rounds: What counts as not stored; `hello` and fences bring it up to date.
        host: Name for people.
        repository: Id of the repository, 32 hexadecimal digits.
        new_id: For tests.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        state: WriterState,
        rounds: Rounds,
        *,
        host: str,
        repository: str,
        new_id: Callable[[], str] = new_hex_id,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._state = state
        self.rounds = rounds
        self._host = host
        self._repository = repository
        self._new_id = new_id
        # One entry at a time: two threads would race for one number, and a fence that one of them passed would be
        # new to the other.
        self._lock = threading.RLock()
        self.writer = ""
        """Name of the log; empty before `hello`."""
        self._next = 0
        # Nonce of the entry before ``_next``, as this process knows it.
        self._before = ""
        # Nonces of entries that were tried at ``_next``: the reply to any of them may have been lost.
        self._tried: dict[str, LogEntry] = {}
        self._said_hello = False
        # True if the log belongs to somebody else, or has ended: another has to be begun.
        self._lost = True
        # True while rounds must be read before anything may be committed.
        self._rounds_unread = True

    @property
    def next_number(self) -> int:
        """Number of the next entry."""
        return self._next

    def hello(self) -> None:
        """Begin to write: continue this host's log, or begin one, then read all rounds.

        On return ``rounds`` has everything that was condemned before; what is condemned later has a fence in this
        log before it is deleted.

        Raises:
            RolledBack: the log is shorter than this host knows it to be.
        """
        with self._lock:
            known = self._state.load()
            self._lost = known is None or not self._continue(known)
            self._rounds_unread = True
            self._get_ready()
            self._said_hello = True

    def commit(
        self,
        snapshot: str,
        manifest: str,
        digest: str,
        packs: Sequence[str] = (),
        *,
        checked: int,
        repository: str = "",
    ) -> bool:
        """Commit the snapshot of a manifest; durable on return of True.

        False: rounds condemned more than the caller took into account. Then everything that the snapshot relies on
        must be looked up again, what is missing uploaded (the manifest under a new name, if ``rounds.manifests`` has
        it), and commit called again.

        Args:
            snapshot: Id of the snapshot in its repository.
            manifest: Name of the manifest's object, which is stored, as are all chunks of the snapshot.
            digest: Its digest.
            packs: Packs that were uploaded for it.
            checked: ``rounds.version`` before the caller began to look up what is stored.
            repository: Id of the snapshot's repository; empty for that of the log.

        Raises:
            UsageError: `hello` was not called, or did not return.
        """
        with self._lock:
            self._require_hello()
            fields = {
                "repository": repository or self._repository,
                "snapshot": snapshot,
                "manifest": manifest,
                "digest": digest,
                "packs": tuple(packs),
            }
            while True:
                self._get_ready()
                if self.rounds.version != checked:
                    return False
                if self._append(self._tried_commit(fields)):
                    return True

    def remove(self, manifests: Sequence[str], snapshots: Sequence[GivenUp] = ()) -> None:
        """Give up the snapshots of these manifests; durable on return.

        Args:
            manifests: Names of the manifests.
            snapshots: Those that their hosts must not upload again by themselves.
        """
        with self._lock:
            self._require_hello()
            entry = LogRemove(nonce=self._new_id(), manifests=tuple(manifests), snapshots=tuple(snapshots))
            while True:
                self._get_ready()
                if self._append(entry):
                    return

    def move(self, packs: Sequence[str], *, checked: int) -> bool:
        """Begin to move these packs to another storage class or place, in place of those before; durable on return of True.

        Until the next call no collector deletes them: every round whose fence follows the entry spares them. False: rounds
        condemned more than the caller took into account; then it leaves out what ``rounds.condemned`` has, and calls again.

        Args:
            packs: Packs that are live and not condemned; none if nothing moves any more.
            checked: ``rounds.version`` before the caller looked at what is condemned.
        """
        with self._lock:
            self._require_hello()
            entry = LogMove(nonce=self._new_id(), packs=tuple(packs))
            while True:
                self._get_ready()
                if packs and self.rounds.version != checked:
                    return False
                if self._append(entry):
                    return True

    def begin_another(self) -> None:
        """Have the next entry begin a new log; this one keeps what it has."""
        with self._lock:
            self._lost = True

    def _require_hello(self) -> None:
        if not self._said_hello:
            raise UsageError("an entry needs a log: call hello() first")

    def _get_ready(self) -> None:
        """Begin another log if this one is lost; read rounds if there may be new ones, in this order."""
        if self._lost:
            self._begin()
        if self._rounds_unread:
            self._read_rounds()

    def _read_rounds(self) -> None:
        self.rounds.refresh()
        self._rounds_unread = False

    def _begin(self) -> None:
        """Begin a log under a new random name."""
        writer = self._new_id()
        self._become(writer, 0, "")
        # Lost until it stands: after an error the next call begins another one.
        self._lost = True
        hello = self._hello()
        if not create_entry(self._objects, self._sealer, writer, 0, hello):
            standing = self._read(0)
            if standing is None or standing.nonce != hello.nonce:
                raise DamagedRemote(log_entry_name(writer, 0), "this name is new, but an object has it")
        self._pass(hello)
        self._save()
        self._lost = False
        self._rounds_unread = True

    def _continue(self, known: WriterPosition) -> bool:
        """Continue the log of an earlier process; False if it has ended or somebody else writes to it."""
        numbers = [
            position.number
            for info in self._objects.list(log_prefix(known.writer))
            if (position := parse_log_entry(info.name))
        ]
        end = max(numbers, default=-1)
        if end < known.next - 1:
            reason = f"this host's log had the entry {known.next - 1}, now its last is {end}"
            name = log_entry_name(known.writer, known.next - 1)
            raise missing_object_error(self._objects, log_prefix(known.writer), name, reason)
        self._become(known.writer, end, "")
        last = self._read(end)
        if last is None or isinstance(last, LogRetired):
            return False
        self._pass(last)
        self._lost = False
        hello = self._hello()
        while not self._lost:
            if self._append(hello):
                return True
        return False

    def _hello(self) -> LogHello:
        return LogHello(nonce=self._new_id(), host=self._host, repository=self._repository)

    def _tried_commit(self, fields: Mapping[str, object]) -> LogCommit:
        """Return the entry of an earlier call with these fields whose reply may have been lost, or a new one."""
        for entry in self._tried.values():
            if isinstance(entry, LogCommit) and all(
                getattr(entry, name) == value for name, value in fields.items()
            ):
                return entry
        return msgspec.convert({"kind": "commit", "nonce": self._new_id(), **fields}, LogCommit)

    def _append(self, entry: LogEntry) -> bool:
        """Try to create the entry at the end of the log as it is known, and pass over what stands there.

        False: try again, unless `_get_ready` finds that something has changed first.
        """
        self._tried[entry.nonce] = entry
        created = create_entry(self._objects, self._sealer, self.writer, self._next, entry)
        standing = entry if created else self._read(self._next)
        mine = standing is not None and standing.nonce in self._tried
        if standing is None or (not mine and not isinstance(standing, LogFence | LogState)):
            # Another uploader has this name, as after a disk was cloned; or the log was ended.
            self._lost = True
            return False
        if mine and not self._stands():
            self._lost = True
            return False
        self._pass(standing)
        self._rounds_unread = self._rounds_unread or isinstance(standing, LogFence)
        if mine:
            self._save()
        # Otherwise one that an earlier call tried to create: it stands, and this one does not yet.
        return standing.nonce == entry.nonce

    def _stands(self) -> bool:
        """Return whether the entry before the one that was created is the one that this process knows."""
        before = self._read(self._next - 1)
        return before is not None and before.nonce == self._before

    def _read(self, number: int) -> LogEntry | None:
        """Return the entry; None if it was deleted, or cannot be read: another log can always be begun."""
        try:
            return read_entry(self._objects, self._sealer, self.writer, number)
        except (NoSuchObject, DamagedRemote, UnsupportedFormat):
            return None

    def _become(self, writer: str, next_: int, before: str) -> None:
        self.writer, self._next, self._before = writer, next_, before
        self._tried.clear()

    def _pass(self, entry: LogEntry) -> None:
        """Note that ``entry`` stands at the end of the log as it was known."""
        self._next += 1
        self._before = entry.nonce
        # Requests that are still under way are for the number that was passed, and fail.
        self._tried.clear()

    def _save(self) -> None:
        self._state.save(WriterPosition(writer=self.writer, next=self._next))
