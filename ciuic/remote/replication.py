"""Process that uploads: keeps each configured remote in step with a repository, in a thread of its own, until SIGTERM.

Guarantees: a snapshot is begun as soon as its file is there. First goes what a resume of a lost host needs: the newest state of
each training, then the newest snapshot of each root, then all others, each the newest first (`in_order_of_need`). Whatever fails is tried again: a store that is
away for days, credentials that expired, a snapshot that cannot be read. The record for those that prune
(`ciuic.protocol.stored_remotely`) names a snapshot as stored only after its commit.

The process needs to read the repository and to write its state directory, and no other privilege. It runs at idle I/O priority
and pauses while other processes wait for the disk. Nothing waits for it but a caller that asked for its snapshot to be on a
remote.

Before a deadline (`ciuic.remote.upload_deadline`) all of that is otherwise: only what is expected to end in time is sent, the
newest state of each training first, the smallest of these before the others; in place of one that would be late the newest older one
that is not. Files follow if there is time for them. The status says what to expect.

What retention needs to know of the snapshots on the remote is remembered in stored_facts.py; the status for people is in upload_status.py.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ciuic import __version__
from ciuic.config import Config, RemoteConfig
from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.protocol.last_drill import read_last_drill
from ciuic.protocol.stored_remotely import (
    LOOK_EVERY_SECONDS,
    StoredRecord,
    StoredRecordDamaged,
    doubt_record,
    note_stored_again,
    read_record,
    remote_lag,
    upload_state_dir,
    write_record,
)
from ciuic.remote import host_status
from ciuic.remote.access import (
    Remote,
    configured_objects,
    configured_secrets,
    open_configured,
    repository_space,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.host_status import HostStatus
from ciuic.remote.log_reader import LogReader, Rounds, naming_memory
from ciuic.remote.objects.model import (
    NoSuchBucket,
    Objects,
    RemoteRefused,
    RemoteUnreachable,
)
from ciuic.remote.objects.wrappers import CountingObjects, LimitedObjects, RateLimit
from ciuic.remote.remote_index import RemoteIndex, list_packs, packs_lacking
from ciuic.remote.stored_facts import (
    FactsOfRemote,
    OtherLogs,
    StoredFacts,
    StoredState,
    add_known_pack,
    content_digest,
    lacking_words,
    manifests_lacking,
    newest_stored_states,
    stored_manifests,
    write_known_packs,
)
from ciuic.remote.upload_deadline import (
    LOOK_SECONDS,
    DeadlineWatch,
    ExpectedState,
    Outcome,
    UploadDeadline,
    UploadForecast,
    WriteRate,
)
from ciuic.remote.upload_status import StatusWriter, Waiting
from ciuic.remote.uploader import (
    MAX_REFUSALS,
    ClosedPack,
    Labels,
    Overtaken,
    Persistence,
    Stopped,
    UncommittedPacks,
    UploadedSnapshot,
    Uploader,
)
from ciuic.remote.writer_log import SEVERAL_WRITERS, LogRotation, WriterLog, WriterState
from ciuic.repository import Repository, SnapshotInfo
from ciuic.repository import log as events
from ciuic.repository.config import MAX_FILE_BYTES
from ciuic.repository.pack_directory import Packs
from ciuic.repository.repository import PACKS_DIR
from ciuic.repository.snapshots import SNAPSHOTS_DIR
from ciuic.retention import plan_retention, snapshots_having
from ciuic.system.disk import read_regular
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.system.precedence import IoPriority, place
from ciuic.system.urgency import REQUESTED_MIN_SHARE, Urgency
from ciuic.types import STATE_TAGS, Snapshot, SnapshotId, is_safety
from ciuic.verdicts.records import VerdictRecords, newest_of

_Result = TypeVar("_Result")
# Packs for which they are listed as often as the log is looked at: two requests. Ten times as many, a tenth as often.
_PACKS_OF_A_LOOK: Final = 1000
# How often the directory of snapshots is looked at: one stat(2).
_POLL_SECONDS: Final = 0.5
# Time after which a snapshot that could not be read is tried again.
_AGAIN_SECONDS: Final = 600.0


class Replication:
    """Replication of one repository to one remote. For one thread; `stop` may be set by any."""

    def __init__(
        self,
        repository: Repository,
        packs: Packs,
        config: RemoteConfig,
        state_dir: Path,
        *,
        host: str,
        persist: Persistence,
        labels: Callable[[Repository, Snapshot], Labels],
        step: Callable[[], None] = lambda: None,
        uploaded: Callable[[UploadedSnapshot], None] = lambda snapshot: None,
        waiting: Callable[[Waiting], None] = lambda waiting: None,
        other_writers: Callable[[int], None] = lambda number: None,
        began: Callable[[Path, WriterLog], None] = lambda directory, log: None,
        doubted: Callable[[str], None] = lambda text: None,
        unreadable: Callable[[str], None] = lambda text: None,
        again: Collection[str] = (),
        deadlines: DeadlineWatch | None = None,
        rate: Callable[[], WriteRate] = WriteRate,
        forecast: Callable[[UploadForecast | None], None] = lambda forecast: None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Take the parts; `run` contacts the remote.

        Args:
            repository: Open repository; only read.
            packs: Packs of it.
            config: The remote's part of the configuration.
            state_dir: State directory of the process, in which the remote has a directory of its name.
            host: Name for people.
            persist: Repeats requests, until the process has to end.
            labels: Names a snapshot for people.
            step: Called between pieces of work.
            uploaded: Called after each commit.
            waiting: Told what the remote lacks, whenever that changes.
            other_writers: Told how many other logs commit snapshots of this repository.
            began: Told the directory of the remote's state and the log of this host, once it is written, or refused.
            doubted: Told in words why the remote is not what this host knows it to be; nothing counts as stored from then on.
            unreadable: Told in words which snapshot could not be read here; with an empty text when none is left.
            again: Snapshots to upload although an operator gave them up.
            deadlines: Tells of the end of this machine; None: it has none.
            rate: Returns how fast the store takes objects.
            forecast: Told what the remote will have at a deadline; None: there is none any more.
            now_ns: The clock, UTC.
        """
        self._repository = repository
        self._packs = packs
        self._config = config
        self._state_dir = state_dir
        self._host = host
        self._persist = persist
        self._labels = labels
        self._step = step
        self._uploaded = uploaded
        self._waiting = waiting
        self._other_writers = other_writers
        self._began = began
        self._doubted = doubted
        self._unreadable = unreadable
        self._again = frozenset(again)
        self._deadlines = deadlines or DeadlineWatch(None)
        self._rate = rate
        self._forecast = forecast
        self._plan: _Plan | None = None
        """Objects to send before the deadline; None without a deadline."""
        self._seen = 0
        """State of the repository for which the upload under way was chosen."""
        self._now_ns = now_ns
        self._stored: set[str] = set()
        self._passed_over: set[str] = set()
        # Committed snapshots of which it is not known since packs were lost whether the remote has all chunks, and those of which it lacks some.
        self._unsure: set[str] = set()
        self._holed: set[str] = set()
        # Snapshots that an operator gave up on the remote, and that are still here.
        self._given_up: set[str] = set()
        # Snapshots that the rules of the remote would not keep.
        self._unwanted: set[str] = set()
        self._index: RemoteIndex
        self._space: Remote
        # Lost packs of which it is known what lacks their chunks.
        self._known_lost: int | None = -1
        # When the packs were last listed.
        self._listed = 0.0
        self._facts: FactsOfRemote
        self._logs: LogReader
        self._own_log: LogRotation
        self._log: WriterLog
        self._adopted: set[str] = set()
        # Directory of the remote's state, and the log of this host.
        self._place: tuple[Path, WriterLog] | None = None
        self._remote_id = ""
        known = _last_record(config, repository.id, state_dir)
        self._tail_ns = 0 if known is None else known.tail_ns
        if known is not None:
            self._passed_over.update(known.passed_over)
        # When the remote was last seen to be what this host knows it to be, and the tick of a clock that nobody sets.
        self._seen_ns, self._looked = 0, 0.0
        # Snapshots that could not be uploaded, and when they are tried again.
        self._failed: dict[str, float] = {}

    def run(self, remote: Remote) -> None:
        """Upload until told to stop.

        Raises:
            DamagedRemote: the remote is not what this host knows it to be.
        """
        try:
            while not self._persist.stop.is_set():
                with self._trusting(), self._open(remote) as uploader:
                    while not self._persist.stop.is_set() and not self._has_lost():
                        seen = self._begin_round(uploader)
                        try:
                            for info in self._next(uploader):
                                self._upload(uploader, info)
                                if self._changes() != seen:
                                    # A newer one may go first.
                                    break
                            else:
                                self._wait(seen)
                        except Overtaken:
                            continue
        except Stopped:
            return

    def catch_up(self, remote: Remote) -> list[UploadedSnapshot]:
        """Upload everything that the remote lacks now, and return.

        Raises:
            Stopped: ``stop`` was set before everything was stored.
            DamagedRemote: the remote is not what this host knows it to be.
        """
        found: list[UploadedSnapshot | None] = []
        with self._trusting(), self._open(remote) as uploader:
            while True:
                self._begin_round(uploader)
                try:
                    found.extend(self._upload(uploader, info) for info in self._next(uploader))
                except Overtaken:
                    continue
                break
            if self._plan is None:
                self._apply_retention(uploader)
        return [one for one in found if one is not None]

    def _begin_round(self, uploader: Uploader) -> int:
        """Look at the repository and the deadline; return the state of the repository."""
        self._seen = self._changes()
        deadline = self._deadlines.now()
        if deadline is not None:
            if self._plan is None or self._plan.deadline != deadline:
                self._plan = _Plan(deadline)
            return self._seen
        if self._plan is not None:
            # The machine is still there.
            self._plan = None
            self._forecast(None)
        self._look_at_packs(uploader)
        self._apply_retention(uploader)
        return self._seen

    def _has_lost(self) -> bool:
        """Return whether packs or manifests are gone that this process knows: then all is to be read again, also what others gave up.

        They are listed now and then, the less often the more packs there are.
        """
        assert self._place is not None
        seconds = LOOK_EVERY_SECONDS * (1 + len(self._index.known) // _PACKS_OF_A_LOOK)
        if time.monotonic() - self._listed <= seconds:
            return False
        self._listed = time.monotonic()
        space = self._space
        sizes = self._index.sizes()
        if self._persist(lambda: packs_lacking(sizes, list_packs(space.objects))):
            return True
        manifests = stored_manifests(str(self._place[0]), self._stored)
        return bool(self._persist(lambda: manifests_lacking(manifests, space.objects)))

    def _look_at_packs(self, uploader: Uploader) -> None:
        """Find out which snapshots lack chunks, where packs were lost since this was last found out.

        These are uploaded again, as far as they are here. Nothing counts as stored that was not looked at since.
        """
        index = self._index
        if index.lost == 0 or index.lost == self._known_lost:
            return
        if index.lost:
            events.warning("remote_packs_lost", remote=self._config.name, packs=index.lost)
        self._unsure = self._stored | self._holed
        self._tell_all()
        here = self._repository.snapshots.names()
        self._holed = set()
        for id_ in sorted(self._unsure):
            self._step()
            if self._persist.stop.is_set():
                raise Stopped
            # What cannot be read here is not asked for; `ciuic check --remote` reads it there.
            with suppress(NotFound, Damaged):
                if id_ in here and not uploader.is_whole(SnapshotId(id_)):
                    self._holed.add(id_)
        self._stored = self._unsure - self._holed
        self._unsure = set()
        self._known_lost = index.lost
        self._tell_all()
        self._note_packs()

    def _note_packs(self) -> None:
        """Note what is there for those that look at the remote later, once no snapshot here lacks what was lost."""
        index = self._index
        if self._holed or self._place is None:
            return
        index.mark_whole()
        finished = index.rounds_finished
        write_known_packs(str(self._place[0]), -1 if finished is None else finished, index.sizes())

    def _next(self, uploader: Uploader) -> Iterable[SnapshotInfo]:
        """Return what is uploaded now, in its order."""
        if self._plan is not None:
            return self._in_time(uploader, self._plan)
        return self._due() if self._window_is_open() else ()

    def _check_overtaken(self) -> None:
        """End an upload for which the choice may be another one by now.

        Raises:
            Overtaken: a deadline has come, gone or changed; or before one there is another newest snapshot.
        """
        if self._deadlines.now() != (None if self._plan is None else self._plan.deadline):
            raise Overtaken
        if self._plan is not None and self._changes() != self._seen:
            raise Overtaken
        self._look()

    @contextmanager
    def _trusting(self) -> Iterator[None]:
        """Have nothing count as stored once the remote turns out not to be what this host knows it to be."""
        try:
            yield
        except (DamagedRemote, NoSuchBucket) as error:
            doubt_record(self._config, self._repository.id, error.message, self._state_dir)
            self._doubted(error.message)
            if self._place is not None:
                self._began(*self._place)
            raise

    def _open(self, remote: Remote) -> _Opened:
        space = self._persist(lambda: repository_space(remote, self._repository))
        self._remote_id = remote.id
        directory = self._state_dir / self._config.name / space.id
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with naming_memory(str(directory), lambda: lacking_words(space, str(directory), self._repository)):
            return self._begin(space, directory)

    def _begin(self, space: Remote, directory: Path) -> _Opened:
        index = RemoteIndex.open(f"{directory}/index.sqlite")
        try:
            rounds = Rounds(space.objects, space.sealer, known=index.rounds_finished)
            log = WriterLog(
                space.objects,
                space.sealer,
                WriterState(f"{directory}/writer"),
                rounds,
                host=self._host,
                repository=self._repository.id,
            )
            uploader = Uploader(
                self._repository,
                self._packs,
                space,
                log,
                index,
                UncommittedPacks(str(directory)),
                host=self._host,
                persist=self._persist,
                bytes_per_second=self._config.bandwidth_bytes,
                labels=self._labels,
                step=self._step,
                stored=self._note_pack,
                check=self._check_overtaken,
            )
            self._place = directory, log
            self._index, self._space = index, space
            self._known_lost, self._holed = -1, set()
            self._note_look(self._now_ns())
            uploader.begin()
            self._listed = self._looked
            reader = LogReader(
                space.objects,
                space.sealer,
                cache_path=f"{directory}/logs",
                skip_damaged=True,
                passes_cuts=True,
            )
            self._persist(reader.refresh)
        except BaseException:
            index.close()
            raise
        others = self._persist(
            lambda: OtherLogs(str(directory), space, reader, self._repository.id, log.own_names)
        )
        self._log, self._adopted = log, others.adopted
        self._other_writers(others.writers)
        if others.writers:
            events.warning(
                "remote_has_other_writers",
                remote=self._config.name,
                logs=others.writers,
                meaning=SEVERAL_WRITERS,
            )
        facts = FactsOfRemote(str(directory), space)
        self._stored = self._persist(
            lambda: facts.learn(
                reader.live(),
                {writer: summary.committed for writer, summary in reader.logs.items()},
                self._repository.id,
                self._own_logs(),
                self._content,
            )
        )
        self._facts = facts
        self._logs = reader
        self._own_log = LogRotation(space.objects, space.sealer, log, reader)
        self._given_up = reader.given_up(self._repository.id) - self._again
        if index.lost != 0:
            self._unsure = set(self._stored)
        # Also where nothing is sent now: it was read again.
        self._tell_all()
        if index.lost == 0:
            self._note_packs()
        self._began(directory, log)
        for damaged in reader.damaged.values():
            # Snapshots whose commits are lost are uploaded again: their packs are there.
            events.warning("remote_log_damaged", remote=self._config.name, error=damaged.error.message)
        return _Opened(uploader, index)

    def _note_pack(self, pack: ClosedPack) -> None:
        # Without the file nobody relies on what it lacks.
        with suppress(FileNotFoundError):
            if self._place is not None:
                add_known_pack(str(self._place[0]), pack.ref, pack.size_bytes)

    def _own_logs(self) -> set[str]:
        """Return the logs whose snapshots are this host's, and subject to its retention."""
        return self._adopted | self._log.own_names

    def _due(self) -> Iterator[SnapshotInfo]:
        """Yield the snapshots that the remote lacks, in the order of need, and tell how many there are."""
        infos = self._repository.snapshots.list()
        unwanted = self._unwanted | (self._given_up - self._stored)
        self._passed_over = unwanted | _passed_over(
            infos, self._stored | self._holed, self._config.schedule.interval_seconds
        )
        lacking = [info for info in infos if info.id not in self._stored | self._passed_over]
        self._tell(infos, lacking)
        now = time.monotonic()
        wanted = [info for info in infos if info.id not in self._passed_over]
        for info in in_order_of_need(self._repository, wanted, self._stored):
            if self._failed.get(info.id, 0) <= now:
                yield info

    def _in_time(self, uploader: Uploader, plan: _Plan) -> Iterator[SnapshotInfo]:
        """Yield what is expected to be stored before the deadline, and tell of all that is not.

        After each one the rest is estimated anew, at the rate of now.
        """
        infos = self._repository.snapshots.list()
        wanted = [info for info in infos if info.id not in self._given_up - self._stored]
        newest = newest_of_roots(self._repository, wanted)
        tried: set[str] = set()
        while True:
            chosen, forecast = self._choose(uploader, plan, wanted, newest, tried)
            self._forecast(forecast)
            for one in forecast.states:
                if plan.reported.get(one.root) != (one.newest, one.outcome, one.resume):
                    plan.reported[one.root] = (one.newest, one.outcome, one.resume)
                    events.warning("upload_before_deadline", **_event_of(self._config.name, forecast, one))
            if chosen is None:
                return
            tried.add(chosen.id)
            yield chosen

    def _choose(
        self,
        uploader: Uploader,
        plan: _Plan,
        infos: Sequence[SnapshotInfo],
        newest: Sequence[_NewestOfRoot],
        tried: Collection[str],
    ) -> tuple[SnapshotInfo | None, UploadForecast]:
        """Return the next snapshot to send, and what the remote will have at the deadline."""
        rate, left = self._rate(), self._deadlines.left(plan.deadline)
        states: list[ExpectedState] = []
        sizes = {one.info.id: self._lacks(uploader, one.info, rate, left) for one in newest}
        chosen: list[SnapshotInfo] = []
        # States before files, and the smallest first: each that is whole is one more training that goes on.
        for one in sorted(newest, key=lambda one: (not one.is_state, sizes[one.info.id] or 0)):
            size_bytes = sizes[one.info.id]
            outcome, needed = self._outcome(one.info, size_bytes, rate, left, tried)
            older = self._older(uploader, one, infos, rate, left, tried) if outcome == "left out" else None
            send = one.info if outcome in ("promised", "tried") else older
            if send is not None:
                chosen.append(send)
                sent = size_bytes if send is one.info else self._lacks(uploader, send, rate, left)
                left -= (None if sent is None else rate.seconds_for(sent)) or 0.0
            states.append(self._expected(one, infos, outcome, size_bytes, needed, send))
        forecast = UploadForecast(
            by_seconds=plan.deadline.by_seconds, cause=plan.deadline.cause, states=tuple(states)
        )
        return next((one for one in chosen if one.id not in tried), None), forecast

    def _outcome(
        self,
        info: SnapshotInfo,
        size_bytes: int | None,
        rate: WriteRate,
        left: float,
        tried: Collection[str],
    ) -> tuple[Outcome, float | None]:
        """Return what becomes of a snapshot in the time that is left, and the time that it needs."""
        if info.id in self._stored:
            return "stored", None
        if size_bytes is None or info.id in tried:
            # It cannot be read, or an upload of it has failed.
            return "left out", None
        needed = rate.seconds_for(size_bytes)
        if needed is None:
            return "tried", None
        return ("promised" if needed <= left else "left out"), needed

    def _older(
        self,
        uploader: Uploader,
        one: _NewestOfRoot,
        infos: Sequence[SnapshotInfo],
        rate: WriteRate,
        left: float,
        tried: Collection[str],
    ) -> SnapshotInfo | None:
        """Return the newest older snapshot of a root that fits, if it is newer than what the remote has."""
        looked_at = 0
        for info in infos:
            if info.id == one.info.id or one.root not in info.roots or info.order_ns > one.info.order_ns:
                continue
            if info.id in self._stored or looked_at == _MAX_OLDER:
                return None
            if one.is_state and not _is_state(self._repository, info):
                continue
            looked_at += 1
            size_bytes = self._lacks(uploader, info, rate, left)
            if self._outcome(info, size_bytes, rate, left, tried)[0] == "promised":
                return info
        return None

    def _lacks(self, uploader: Uploader, info: SnapshotInfo, rate: WriteRate, left: float) -> int | None:
        """Return the bytes that the remote lacks of a snapshot, of one that is late in any case at least so many; None if it cannot be read."""
        if info.id in self._stored:
            return 0
        try:
            return uploader.missing_bytes(info.id, rate.bytes_within(left))
        except (NotFound, Damaged):
            return None

    def _expected(
        self,
        one: _NewestOfRoot,
        infos: Sequence[SnapshotInfo],
        outcome: Outcome,
        size_bytes: int | None,
        needed: float | None,
        send: SnapshotInfo | None,
    ) -> ExpectedState:
        """Return what the remote will have of a root; what is only tried does not count."""
        stored = [info for info in infos if info.id in self._stored and one.root in info.roots]
        if send is not None and outcome != "tried":
            stored.append(send)
        resume = max(stored, key=lambda info: (info.order_ns, info.id), default=None)
        labels = Labels()
        with suppress(CiuicError):
            if resume is not None and one.is_state:
                labels = self._labels(self._repository, self._repository.snapshots.load(resume.id))
        return ExpectedState(
            root=one.root,
            newest=str(one.info.id),
            outcome=outcome,
            size_bytes=size_bytes or 0,
            needed_seconds=needed,
            resume="" if resume is None else str(resume.id),
            epoch=labels.epoch,
            step=labels.step,
            in_set=one.in_set,
        )

    def _apply_retention(self, uploader: Uploader) -> None:
        """Give up what no rule of the remote keeps, and pass over what none would keep."""
        here = {str(info.id): info for info in self._repository.snapshots.list()}
        # Marks may have changed since the upload: a snapshot that is held here now is kept there.
        own = self._facts.committed_in(self._own_logs())
        everything: dict[str, StoredFacts | SnapshotInfo] = {**own, **here}
        roots = {one.id: one.roots for one in everything.values()}
        plan = plan_retention(
            everything.values(),
            self._config.keep,
            now_ns=self._now_ns(),
            # For each root alone: a training that saves often takes no other root's place.
            having=snapshots_having(roots, {root for paths in roots.values() for root in paths}),
        )
        removed = {str(id_) for id_ in plan.removed}
        given_up = [one for id_, one in own.items() if id_ in removed]
        self._holed -= removed
        # What a damaged log commits, or lacks chunks, may be what the rules would keep in place of these.
        if given_up and not self._logs.damaged and not self._holed:
            uploader.give_up([one.manifest for one in given_up])
            self._stored.difference_update(one.snapshot for one in given_up)
            self._facts.remove([one.snapshot for one in given_up])
        self._unwanted = removed - self._stored

    def _upload(self, uploader: Uploader, info: SnapshotInfo) -> UploadedSnapshot | None:
        self._check_overtaken()
        id_ = info.id
        done = None
        try:
            if id_ in self._holed:
                uploader.fill(id_)
            else:
                done = uploader.upload(id_)
        except DamagedRemote:
            # Not of this snapshot: the remote is not what this host knows it to be, and nothing is added to it.
            raise
        except (NotFound, Damaged) as error:
            if not os.path.exists(self._repository.snapshots.path(id_)):
                # Removed meanwhile.
                return None
            events.warning("snapshot_not_uploaded", snapshot=id_, error=error.message)
            self._failed[id_] = time.monotonic() + _AGAIN_SECONDS
            self._unreadable(f"{id_} cannot be uploaded: {error.message}")
            return None
        finally:
            # The space of a pack that prune deletes is free only when no process has it open.
            self._packs.close()
            self._repository.close()
        self._stored.add(id_)
        if done is None:
            self._holed.discard(id_)
            self._note_packs()
        else:
            self._facts.add(info, done, self._content(id_), self._log.writer)
            # A commit without its manifest is damage until it is given up.
            if lost := self._facts.lost.pop(id_, ()):
                uploader.give_up(lost)
        note_stored_again(self._config, id_, self._state_dir)
        if self._failed.pop(id_, None) is not None and not self._failed:
            self._unreadable("")
        self._tell_all()
        if done is not None:
            self._uploaded(done)
            self._persist(self._own_log.tidy)
        return done

    def _content(self, id_: str) -> str:
        """Return the digest of a snapshot file here; empty if it is not here."""
        try:
            return content_digest(
                read_regular(self._repository.snapshots.path(SnapshotId(id_)), MAX_FILE_BYTES)
            )
        except OSError:
            return ""

    def _look(self) -> None:
        """Look whether the remote is still what this host knows it to be, where the last look is some minutes old.

        Raises:
            DamagedRemote: it is not.
        """
        if time.monotonic() - self._looked < LOOK_EVERY_SECONDS:
            return
        began_ns = self._now_ns()
        # In an outage nothing else could be done either.
        if self._persist(self._log.look):
            self._note_look(began_ns)
            self._tell_all()

    def _note_look(self, began_ns: int) -> None:
        self._seen_ns, self._looked = began_ns, time.monotonic()

    def _tell_all(self) -> None:
        infos = self._repository.snapshots.list()
        self._tell(infos, [info for info in infos if info.id not in self._stored | self._passed_over])

    def _tell(self, infos: list[SnapshotInfo], lacking: list[SnapshotInfo]) -> None:
        here = {info.id for info in infos}
        times = [info.time_ns for info in infos if info.id in self._stored]
        self._tail_ns = max([self._tail_ns, *times])
        record = StoredRecord(
            repository=self._repository.id,
            stored=frozenset(map(str, self._stored & here - self._unsure)),
            passed_over=frozenset(map(str, self._passed_over & here)),
            tail_ns=self._tail_ns,
            url=self._config.url,
            remote=self._remote_id,
            seen_ns=max(0, self._seen_ns),
        )
        write_record(self._config.name, record, self._state_dir)
        oldest = min((info.time_ns for info in lacking), default=0)
        self._waiting(Waiting(len(lacking), sum(info.new_bytes for info in lacking), oldest))

    def _window_is_open(self) -> bool:
        window = self._config.schedule.window
        if window is None:
            return True
        now = datetime.fromtimestamp(self._now_ns() / 1e9).astimezone()
        return window.is_open(60 * now.hour + now.minute)

    def _changes(self) -> int:
        try:
            return os.stat(f"{self._repository.path}/{SNAPSHOTS_DIR}").st_mtime_ns
        except OSError as error:
            raise CiuicError(
                f"the repository {self._repository.path} cannot be read: {error.strerror}"
            ) from error

    def _wait(self, seen: int) -> None:
        """Return when snapshots came or went, the window opened, or a failed one is due again."""
        began, was_open = time.monotonic(), self._window_is_open()
        deadline = None if self._plan is None else self._plan.deadline
        while not self._persist.stop.wait(_POLL_SECONDS if deadline is None else LOOK_SECONDS):
            if self._changes() != seen or self._window_is_open() != was_open:
                return
            if self._deadlines.now() != deadline:
                return
            if time.monotonic() - began > _AGAIN_SECONDS:
                return
            self._look()


def _last_record(remote: RemoteConfig, repository_id: str, state_dir: Path) -> StoredRecord | None:
    """Return the record of a repository that an earlier process wrote; None for none that can be read."""
    try:
        record = read_record(remote.name, state_dir)
    except StoredRecordDamaged:
        return None
    is_its = record is not None and record.repository == repository_id and record.is_of(remote)
    return record if is_its else None


class _Opened:
    """An uploader, and the index that it has open."""

    def __init__(self, uploader: Uploader, index: RemoteIndex) -> None:
        self._uploader = uploader
        self._index = index

    def __enter__(self) -> Uploader:
        return self._uploader

    def __exit__(self, *error: object) -> None:
        self._index.close()


def in_order_of_need(
    repository: Repository, infos: Iterable[SnapshotInfo], stored: Collection[str]
) -> list[SnapshotInfo]:
    """Return the snapshots that a remote lacks in the order in which a resume from there needs them.

    A state is small beside the files of a root, and a training resumes from nothing else: it does not wait for them.

    Args:
        repository: The repository.
        infos: Its snapshots, newest first, without those that the remote does not want.
        stored: Ids of those that the remote has.
    """
    states: list[SnapshotInfo] = []
    files: list[SnapshotInfo] = []
    others: list[SnapshotInfo] = []
    seen: set[bytes] = set()
    for info in infos:
        is_newest = not seen.issuperset(info.roots) and not is_safety(info.tags, info.message)
        if is_newest:
            seen.update(info.roots)
        if info.id in stored:
            continue
        if not is_newest:
            others.append(info)
        elif _is_state(repository, info):
            states.append(info)
        else:
            files.append(info)
    return states + files + others


# Older snapshots of a training that are looked at where the newest would be late: each costs a walk.
_MAX_OLDER: Final = 8


class _Plan:
    """Objects to send before a deadline."""

    def __init__(self, deadline: UploadDeadline) -> None:
        self.deadline = deadline
        self.reported: dict[bytes, tuple[str, str, str]] = {}
        """Newest snapshot, its outcome and that of a resume, by root, as the log has them."""


class _NewestOfRoot(NamedTuple):
    """Newest snapshot of a root."""

    root: bytes
    info: SnapshotInfo
    is_state: bool
    in_set: bool


def newest_of_roots(repository: Repository, infos: Iterable[SnapshotInfo]) -> list[_NewestOfRoot]:
    """Return the newest snapshot of each root, without those that were taken before a restore.

    Args:
        repository: The repository.
        infos: Its snapshots, newest first.
    """
    found: dict[bytes, _NewestOfRoot] = {}
    for info in infos:
        roots = [root for root in info.roots if root not in found]
        if not roots or is_safety(info.tags, info.message):
            continue
        try:
            snapshot = None if STATE_TAGS.isdisjoint(info.tags) else repository.snapshots.load(info.id)
        except CiuicError:
            # Removed meanwhile, or damaged: it cannot be uploaded.
            continue
        is_state = snapshot is not None and snapshot.is_state
        in_set = snapshot is not None and snapshot.set_member is not None
        found.update({root: _NewestOfRoot(root, info, is_state, in_set) for root in roots})
    return list(found.values())


def _event_of(name: str, forecast: UploadForecast, one: ExpectedState) -> dict[str, str | int | float]:
    """Return the fields of a line of the log."""
    return {
        "remote": name,
        "cause": forecast.cause,
        "newest": one.newest,
        "outcome": one.outcome,
        "size_bytes": one.size_bytes,
        **({} if one.needed_seconds is None else {"needed_seconds": round(one.needed_seconds, 1)}),
        "resume": one.resume or "nothing",
        **({} if one.step is None else {"step": one.step}),
    }


def _is_state(repository: Repository, info: SnapshotInfo) -> bool:
    if STATE_TAGS.isdisjoint(info.tags):
        return False
    try:
        return repository.snapshots.load(info.id).is_state
    except CiuicError:
        # Removed meanwhile, or damaged: the upload says so.
        return False


def _passed_over(infos: Iterable[SnapshotInfo], stored: set[str], interval_seconds: int) -> set[str]:
    """Return the snapshots that lie less than the interval after one that goes to the remote."""
    passed: set[str] = set()
    last_ns: int | None = None
    # From the oldest on, so that what goes to the remote does not depend on when it was looked at.
    for info in sorted(infos, key=lambda info: (info.time_ns, info.id)):
        if info.id in stored or last_ns is None or info.time_ns - last_ns >= interval_seconds * 10**9:
            last_ns = info.time_ns
        else:
            passed.add(info.id)
    return passed


# An upload is never urgent, and still must end on a busy machine.
_MIN_SHARE: Final = 0.05
# Time after which a remote that was refused, or a repository that is not there yet, is tried again.
_REOPEN_SECONDS: Final = 30.0
LabelsOf = Callable[[Repository, Snapshot], Labels]


def run(
    config: Config,
    repository_dir: Path,
    *,
    labels: LabelsOf = lambda repository, snapshot: Labels(),
    once: bool = False,
    again: Collection[str] = (),
    stop: threading.Event | None = None,
    state_dir: Path | None = None,
    tell: Callable[[str, str], None] = lambda name, text: None,
    urgent_nice: int = 0,
) -> None:
    """Upload to all configured remotes until SIGTERM or SIGINT; with ``once`` until each has everything.

    Args:
        config: Configuration.
        repository_dir: Repository, which is only read; may be made later.
        labels: Names a snapshot for people.
        once: Return when nothing is missing.
        again: Snapshots to upload although an operator gave them up.
        stop: Ends the process when it is set; None: signals alone.
        state_dir: State directory; None: `upload_state_dir`.
        tell: Told the name of a remote and in words what it waits for, at each attempt; with an empty text when it goes on.
            Called by several threads.
        urgent_nice: Nice value before a deadline, where the process may return to it.

    Each remote is on its own: one that is away, or refuses, keeps none of the others waiting.

    Raises:
        NotFound: no remote is configured.
        CiuicError: with ``once``, when all have ended: what stopped the upload to the first that failed.
    """
    if not config.remotes:
        raise NotFound("no remote is configured", hint="ciuic remote init URL makes one")
    event = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: event.set())
    if not once:
        with suppress(OSError):
            yield_to_others("idle", _MIN_SHARE)
    directory = state_dir or upload_state_dir()
    os.makedirs(directory, mode=0o755, exist_ok=True)
    failures: list[BaseException] = []
    uploads = [
        _RemoteUpload(config, remote, repository_dir, directory, event, labels, again, tell)
        for remote in config.remotes
    ]
    ended = threading.Event()
    watch = threading.Thread(
        target=_watch_deadline,
        args=(directory, uploads, ended, None if once else urgent_nice),
        name="deadline",
        daemon=True,
    )
    watch.start()

    def upload(one: _RemoteUpload) -> None:
        try:
            one.run(once=once)
        except Stopped:
            return
        except (CiuicError, OSError) as error:
            # With ``once``: the others go on to their end.
            failures.append(error)
        except BaseException as error:
            # A defect: nothing is known of the state of this process, and its service manager starts it again.
            failures.insert(0, error)
            event.set()

    threads = [threading.Thread(target=upload, args=(one,), name=one.name) for one in uploads]
    for thread in threads:
        thread.start()
    for thread in threads:
        # In slices, so that signals are handled meanwhile.
        while thread.is_alive():
            thread.join(0.5)
    ended.set()
    # It refers to the uploads, and to the descriptors of their gauges.
    watch.join()
    if failures:
        raise failures[0]


def _watch_deadline(
    state_dir: Path, uploads: Sequence[_RemoteUpload], ended: threading.Event, urgent_nice: int | None
) -> None:
    """Make the uploads urgent while there is a deadline; ``urgent_nice`` is None where the process has its full priority."""
    deadlines = DeadlineWatch(state_dir)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    idle = IoPriority.parse("idle")
    urgent = False
    while not ended.wait(LOOK_SECONDS):
        if urgent == (deadlines.now() is not None):
            continue
        urgent = not urgent
        for one in uploads:
            one.urge(urgent)
        if urgent_nice is not None and urgent:
            place(os.getpid(), 1.0, idle, min_nice=urgent_nice)
        elif urgent_nice is not None:
            place(os.getpid(), _MIN_SHARE, idle, min_nice=nice)


class _RemoteUpload:
    """Upload to one remote."""

    def __init__(
        self,
        config: Config,
        remote: RemoteConfig,
        repository_dir: Path,
        state_dir: Path,
        stop: threading.Event,
        labels: LabelsOf,
        again: Collection[str],
        tell: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._remote = remote
        self._repository_dir = repository_dir
        self._state_dir = state_dir
        self._stop = stop
        self._labels = labels
        self._again = again
        self._objects: Objects | None = None
        self._status = StatusWriter(remote.name, state_dir, os.getpid(), tell=tell)
        self._reporter: host_status.StatusReporter | None = None
        self._limit = RateLimit(remote.bandwidth_bytes)
        self._counting: CountingObjects | None = None
        self._pace: Pace | None = None
        self._urgent = False

    @property
    def name(self) -> str:
        return self._remote.name

    def urge(self, urgent: bool) -> None:
        """Work without pauses and without a limit of the rate, or as usual again; from another thread."""
        self._urgent = urgent
        self._limit.change(None if urgent else self._remote.bandwidth_bytes)
        if self._pace is not None:
            self._pace.urge(self._urgency(once=False))

    def _urgency(self, *, once: bool) -> Urgency:
        if self._urgent:
            return Urgency(min_share=1.0)
        # Somebody waits for the end of a single run.
        return Urgency(min_share=REQUESTED_MIN_SHARE if once else _MIN_SHARE)

    def run(self, *, once: bool) -> None:
        """Upload; without ``once`` also what fails is tried again."""
        try:
            while not self._stop.is_set():
                try:
                    return self._upload(once=once)
                except (CiuicError, OSError) as error:
                    text = error.message if isinstance(error, CiuicError) else str(error)
                    if once:
                        self._status.failed(text)
                        raise
                    events.warning("upload_failed", remote=self._remote.name, error=text)
                    self._status.problem(text)
                    self._stop.wait(_REOPEN_SECONDS)
        finally:
            if self._reporter is not None:
                if once:
                    self._reporter.report()
                self._reporter.close()
            if self._objects is not None:
                self._objects.close()

    def _store(self) -> Objects:
        """Return the store. RemoteUnreachable while the directory of a ``file`` URL is not there."""
        if self._objects is None:
            self._counting = CountingObjects(configured_objects(self._remote))
            self._status.counts(self._counting)
            self._objects = LimitedObjects(self._counting, self._limit, RateLimit(None))
        return self._objects

    def _upload(self, *, once: bool) -> None:
        with ExitStack() as closing:
            repository = closing.enter_context(Repository.open(self._repository_dir))
            packs = Packs(
                f"{self._repository_dir}/{PACKS_DIR}", bytes.fromhex(repository.id), repository.config.hash
            )
            closing.callback(packs.close)
            persist = Persistence(self._stop, self._status.problem, MAX_REFUSALS if once else None)
            objects = self._store() if once else persist(self._store)
            secrets = configured_secrets(self._remote)
            try:
                remote = persist(lambda: open_configured(self._remote, objects, secrets))
            except (RemoteRefused, RemoteUnreachable):
                # Nothing is known of what is there.
                raise
            except CiuicError as error:
                # Another remote, none, or one that no key of this host opens.
                doubt_record(self._remote, repository.id, error.message, self._state_dir)
                raise
            self._status.opened(remote.id)
            pace = Pace(
                gauges(waits_files(str(self._config.runtime_dir))),
                urgency=self._urgency(once=once),
                processor_waits=processor_waits(),
            )

            self._pace = pace

            def step() -> None:
                pace.step()
                self._status.step()

            def began(directory: Path, log: WriterLog) -> None:
                self._begin_reports(remote, directory, log, promised=not once)

            replication = Replication(
                repository,
                packs,
                self._remote,
                self._state_dir,
                host=socket.gethostname(),
                persist=persist,
                labels=self._labels,
                step=step,
                uploaded=self._status.uploaded,
                waiting=self._status.waiting,
                other_writers=self._status.other_writers,
                began=began,
                doubted=self._status.failed,
                unreadable=self._status.unreadable,
                again=self._again,
                deadlines=DeadlineWatch(self._state_dir),
                rate=lambda: WriteRate() if self._counting is None else self._counting.write_rate(),
                forecast=self._status.forecast,
            )
            if not once:
                replication.run(remote)
                return
            replication.catch_up(remote)

    def _begin_reports(self, remote: Remote, directory: Path, log: WriterLog, *, promised: bool) -> None:
        """Have this host say on the remote how it is, until this process ends; ``promised``: again and again."""
        every_seconds = self._remote.status_every_seconds
        if not every_seconds or self._reporter is not None:
            return
        try:
            key = host_status.own_key(f"{directory}/status-key", log.writer, log.own_names)
        except OSError as error:
            events.warning("host_status_without_key", error=str(error))
            return

        def facts() -> HostStatus:
            return _host_status(
                self._repository_dir,
                self._remote,
                self._state_dir,
                remote.id,
                self._labels,
                self._status.error,
                every_seconds if promised else 0,
                self._config.checkpoint_patterns,
            )

        self._reporter = host_status.StatusReporter(remote.objects, remote.sealer, key, facts, every_seconds)
        if promised:
            self._status.changed = self._reporter.changed
            self._reporter.start()


def _host_status(
    repository_dir: Path,
    remote: RemoteConfig,
    state_dir: Path,
    remote_id: str,
    labels: LabelsOf,
    error: str,
    interval_seconds: int,
    checkpoint_patterns: Sequence[str],
) -> HostStatus:
    """Return what this host says of itself on a remote; nothing but local files is read."""
    now_ns = time.time_ns()
    with Repository.open(repository_dir) as repository:
        infos = repository.snapshots.list()
        lag = remote_lag(remote, repository.id, infos, now_ns=now_ns, state_dir=state_dir)
        newest: dict[bytes, SnapshotInfo] = {}
        states: dict[bytes, host_status.StatusState] = {}
        for info in infos:
            if is_safety(info.tags, info.message):
                continue
            for root in info.roots:
                if root not in newest and _is_state(repository, info):
                    states[root] = _local_state(repository, info, labels)
                newest.setdefault(root, info)
        stored = newest_stored_states(state_dir, remote, (repository.id, remote_id))
        verdicts = VerdictRecords(repository, patterns=checkpoint_patterns)
        roots = [(path, info) for path, info in newest.items() if path not in states]
        drill = read_last_drill(remote.name, state_dir)
        return HostStatus(
            time_ns=now_ns,
            host=socket.gethostname(),
            ciuic=__version__,
            repository=repository.id,
            interval_seconds=interval_seconds,
            max_lag_seconds=remote.max_lag_seconds,
            behind=host_status.StatusBehind(
                snapshots=lag.snapshots,
                size_bytes=lag.size_bytes,
                only_here_ns=now_ns - int(lag.seconds * 1e9) if lag.seconds else 0,
            ),
            newest=host_status.StatusState(snapshot=str(infos[0].id), time_ns=max(0, infos[0].time_ns))
            if infos
            else None,
            newest_stored_ns=lag.newest_ns,
            error=host_status.limited(error),
            roots=tuple(
                _root_status(repository, path, info, verdicts)
                for path, info in roots[: host_status.MAX_ENTRIES]
            ),
            trainings=tuple(
                host_status.StatusTraining(
                    name=host_status.limited(os.fsdecode(path.strip(b"/"))),
                    local=states.get(path),
                    stored=_stored_state(stored.get(path)),
                )
                for path in sorted(states.keys() | stored.keys())[: host_status.MAX_ENTRIES]
            ),
            drill=None
            if drill is None
            else host_status.StatusDrill(
                time_ns=drill.time_ns, verdict=drill.verdict, reason=host_status.limited(drill.reason)
            ),
        )


def _local_state(repository: Repository, info: SnapshotInfo, labels: LabelsOf) -> host_status.StatusState:
    epoch, step = None, None
    # What cannot be read here says nothing of the step.
    with suppress(CiuicError, ValueError):
        found = labels(repository, repository.snapshots.load(info.id))
        epoch, step = found.epoch, found.step
    return host_status.StatusState(
        snapshot=str(info.id), time_ns=max(0, info.time_ns), epoch=epoch, step=step
    )


def _stored_state(state: StoredState | None) -> host_status.StatusState | None:
    if state is None:
        return None
    return host_status.StatusState(
        snapshot=state.snapshot, time_ns=state.time_ns, epoch=state.epoch, step=state.step
    )


def _root_status(
    repository: Repository, path: bytes, info: SnapshotInfo, verdicts: VerdictRecords
) -> host_status.StatusRoot:
    newest = None
    with suppress(CiuicError):
        record = verdicts.record(repository.snapshots.load(info.id))
        # Of this root: the newest one of the snapshot may be another root's.
        newest = None if record is None else newest_of(dict(record.roots).get(path, ()))
    verdict = None if newest is None else newest.checkpoint.verdict
    return host_status.StatusRoot(
        path=host_status.limited(os.fsdecode(path)),
        snapshot=str(info.id),
        time_ns=max(0, info.time_ns),
        verdict="" if verdict is None else verdict.state,
        reason="" if verdict is None else host_status.limited(verdict.reason),
    )
