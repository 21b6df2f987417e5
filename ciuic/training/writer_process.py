"""Writer process: stores a trainer's state in the repository, and outlives the trainer.

It has a session of its own, so that what ends the trainer's process group does not end it, and runs with low
priority. When the trainer is gone (killed, crashed, out of memory) it finishes every state that it was given
completely, and exits. It reports failures to the trainer, or to the standard error if the trainer is gone;
none of them reaches the training.

After a snapshot, while nothing else is to do, it applies the rules of retention: see `housekeeping`. It registers the
trainer with a daemon, because it can wait and can tell the daemon how the trainer ended.

Make a snapshot of files that stand in memory.

Guarantees: when `commit` returns the snapshot is durable with every byte of every file; before, it does not
exist. Content that the repository has is not stored again: a file whose content equals that of the last
snapshot keeps its entry, so that trees are shared and its time stays the time of its last change.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import select
import signal
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from ciuic.errors import CiuicError, Damaged, Unreachable
from ciuic.protocol.heartbeat_page import Goodbye, read_page
from ciuic.protocol.watch_client import Hello, Registration, watch_socket
from ciuic.repository import Repository, Writer
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.compression import Codec, Content
from ciuic.repository.identity import is_zero
from ciuic.repository.locks import Claim
from ciuic.structs import decode_msgpack
from ciuic.system import cloud_notices
from ciuic.system.poll import readable
from ciuic.training.arena import ReadArena
from ciuic.training.remote.uploads import Uploads
from ciuic.training.save_schedule import measure
from ciuic.training.writer import codecs, rank_parts
from ciuic.training.writer.codecs import (
    SEAL_FROM_BYTES,
    CodecChooser,
    CodingTurns,
    CommitCodecs,
    ReverseDeltas,
)
from ciuic.training.writer.housekeeping import DAMAGE_NOTE, WriterHousekeeping
from ciuic.training.writer.messages import (
    SENT_TO_ALL,
    Attach,
    Awaited,
    Begin,
    Finish,
    FromTrainer,
    FromWriter,
    Manifest,
    ManifestFile,
    Measured,
    Note,
    NotSaved,
    PreemptionNotice,
    Put,
    Saved,
    SaveRequest,
    StoredFile,
    StoredFiles,
    receive_from_trainer,
    send,
)
from ciuic.training.writer.paired_files import PairAnswer
from ciuic.types import (
    PAIRED,
    ChunkId,
    Entry,
    MapRef,
    Pair,
    RootRecord,
    Snapshot,
    SnapshotDraft,
    SnapshotId,
    TreeRef,
)

_BATCH_BLOCKS: Final = 16
"""Blocks that are looked up and stored together: 4 MiB."""
_EMPTY: Final = MapRef(b"", 0)


class LastCommit:
    """Entries of the last snapshot of this writer, from which the next one takes what did not change."""

    def __init__(self) -> None:
        self.snapshot = ""
        self.entries: dict[str, Entry] = {}
        self.folders: dict[bytes, tuple[dict[bytes, Entry], Entry]] = {}
        """Listing and entry of each directory, by name."""


def commit(
    repository: Repository,
    writer: Writer,
    memory: memoryview,
    manifest: Manifest,
    root: bytes,
    known: LastCommit,
    chosen: CommitCodecs | None = None,
    pair: Callable[[], Pair | None] = lambda: None,
) -> Snapshot:
    """Store a manifest's files as one snapshot, together with files that are stored already.

    Args:
        repository: the opened repository.
        writer: holder of the repository's lock.
        memory: the arena.
        manifest: `files` lie in `memory`; `stored` are in the repository.
        root: path under which the snapshot keeps the files.
        known: entries of the last snapshot; updated on success, unchanged on failure.
        chosen: codecs of the files; None leaves the choice to the repository.
        pair: called when everything is stored, for the record of the paired snapshot.

    Raises:
        Damaged: content that `manifest.stored` names is missing; there is no snapshot.
        OSError: writing failed; there is no snapshot.
    """
    if known.snapshot not in repository.snapshots.names():
        # The last snapshot was removed, and the content of its trees may have been swept with it.
        known.folders = {}
    put = _TreeBuilder(writer, repository.block_size, manifest.time_ns, known, chosen)
    entries = {file.path: put.stored(file) for file in manifest.stored}
    files = manifest.files if chosen is None else chosen.in_order(manifest.files, memory)
    # In an order in which half-precision copies precede the masters that may be based on them.
    entries |= {file.path: put.file(file, memory) for file in files}
    folders = put.folders(entries)
    top = _folder(b"", put.time_ns, writer.update_tree(b"", _listing(entries, folders)))
    # Asked for as late as possible: the daemon answers while the files are stored, so that nothing waits for
    # it.
    other = pair()
    tags = manifest.tags if other is None or not other.id else (*manifest.tags, PAIRED)
    draft = SnapshotDraft(
        id=_snapshot_id(repository, manifest.id),
        # Not simply the time of the state: the newest snapshot must be the one taken last.
        time_ns=_commit_time_ns(repository, root, manifest.time_ns),
        host=socket.gethostname(),
        roots=(RootRecord(path=root, entry=top),),
        tags=tags,
        message=manifest.message,
        parent=known.snapshot,
        pair=other,
        set_member=manifest.set_member,
    )
    snapshot = writer.commit(draft)
    if manifest.hold_reason:
        snapshot = writer.set_marks(draft.id, hold=True, reason=manifest.hold_reason)
    # Only now: after a failed commit the next one must still compare with the snapshot that exists.
    known.snapshot, known.entries, known.folders = snapshot.id, entries, folders
    return snapshot


def _snapshot_id(repository: Repository, wanted: str) -> SnapshotId:
    """Return the wanted id if it is free, else a new one."""
    # The trainer has planned it without a look at the repository.
    return (
        SnapshotId(wanted)
        if wanted and wanted not in repository.snapshots.names()
        else repository.snapshots.new_id()
    )


def _commit_time_ns(repository: Repository, root: bytes, time_ns: int) -> int:
    """Return a time later than that of the newest snapshot of the root."""
    # Clocks are set back, and those of machines differ; yet the snapshot taken last must be the newest for
    # loading and for retention.
    newest = repository.snapshots.latest(root)
    return time_ns if newest is None else max(time_ns, newest.time_ns + 1)


def put_files(
    repository: Repository,
    writer: Writer,
    memory: memoryview,
    manifest: Manifest,
    chosen: CommitCodecs | None = None,
) -> list[StoredFile]:
    """Store a manifest's files durably, for a snapshot that another process makes.

    That process must hold a claim on the repository meanwhile, otherwise a sweep may free the content.

    Args:
        repository: the opened repository.
        writer: holder of the repository's lock.
        memory: the arena.
        manifest: its `files` are stored.
        chosen: codecs of the files; None leaves the choice to the repository.

    Raises:
        OSError: writing failed.
    """
    put = _TreeBuilder(writer, repository.block_size, manifest.time_ns, LastCommit(), chosen)
    stored = []
    for file in manifest.files if chosen is None else chosen.in_order(manifest.files, memory):
        entry = put.file(file, memory)
        stored.append(StoredFile(file.path, entry.size_bytes, entry.content, entry.map_height))
    # Before the answer: another process makes a snapshot of these files as soon as it hears of them.
    writer.flush()
    return stored


class _TreeBuilder:
    """Store the files of one snapshot and make the entries of its tree."""

    def __init__(
        self,
        writer: Writer,
        block_size: int,
        time_ns: int,
        known: LastCommit,
        chosen: CommitCodecs | None = None,
    ) -> None:
        self._chosen = chosen
        self.time_ns = time_ns
        self._writer = writer
        self._block_size = block_size
        self._known = known

    def file(self, file: ManifestFile, memory: memoryview) -> Entry:
        """Store one file of the arena and return its entry."""
        data = memory[file.offset : file.offset + file.size_bytes]
        if len(data) != file.size_bytes:
            raise ValueError(f"{file.path} ends beyond the arena of {len(memory)} bytes")
        blocks = blocks_of(file.size_bytes, self._block_size)
        if self._chosen is None:
            stored = self._blocks(data, blocks, lambda _: None)
        else:
            stored = self._blocks(data, blocks, self._chosen.codec(file))
            self._chosen.blocks[file.path] = stored
        content = self._writer.update_block_map(_EMPTY, blocks, stored)
        return self._entry(file.path, file.size_bytes, content)

    def stored(self, file: StoredFile) -> Entry:
        """Return the entry of a file whose content is in the repository already.

        Raises:
            Damaged: part of the content is missing.
        """
        chunks, maps = self._writer.chunks, self._writer.block_maps
        blocks = blocks_of(file.size_bytes, self._block_size)
        here = not file.map_height or all(map(chunks.has, maps.nodes(file.content, file.map_height)))
        # Every block is looked up once more: the claim keeps a sweep away, but not an operator's rm or a
        # damaged index.
        if not (here and all(chunks.has(id_) for _, id_ in maps.ids(file.content, file.map_height, blocks))):
            raise Damaged(f"stored content of {file.path} is missing from the repository")
        return self._entry(file.path, file.size_bytes, MapRef(file.content, file.map_height))

    def _entry(self, path: str, size_bytes: int, content: MapRef) -> Entry:
        """Return the file's entry: that of the last snapshot if the content is the same."""
        before = self._known.entries.get(path)
        # The same entry, times included: the listing stays equal, and the directory's tree is shared with the
        # last snapshot.
        if before is not None and (before.content, before.size_bytes) == (content.content, size_bytes):
            return before
        return Entry(
            name=os.fsencode(path.rpartition("/")[2]),
            mode=stat.S_IFREG | 0o644,
            uid=os.getuid(),
            gid=os.getgid(),
            size_bytes=size_bytes,
            mtime_ns=self.time_ns,
            ctime_ns=self.time_ns,
            atime_ns=self.time_ns,
            content=content.content,
            map_height=content.map_height,
        )

    def _blocks(
        self, data: memoryview, blocks: int, codec: Callable[[int], Codec | None]
    ) -> dict[int, ChunkId]:
        """Store a file's blocks and return their ids by number; blocks of zeros are left out."""
        stored: dict[int, ChunkId] = {}
        for first in range(0, blocks, _BATCH_BLOCKS):
            run: dict[int, Content] = {}
            for index in range(first, min(blocks, first + _BATCH_BLOCKS)):
                at = index * self._block_size
                block = data[at : at + self._block_size]
                # Blocks of zeros are holes and take no chunk.
                if not is_zero(block):
                    run[index] = Content(block, codec=codec(index))
            stored.update(zip(run, self._writer.put_chunks(list(run.values())), strict=True))
        return stored

    def folders(self, entries: dict[str, Entry]) -> dict[bytes, tuple[dict[bytes, Entry], Entry]]:
        """Return listing and entry of each directory; paths have one level of directories at most."""
        inside: dict[bytes, dict[bytes, Entry]] = {}
        for path, entry in entries.items():
            folder, slash, _ = path.rpartition("/")
            if slash:
                inside.setdefault(os.fsencode(folder), {})[entry.name] = entry
        made = {}
        for name, listing in inside.items():
            before = self._known.folders.get(name)
            if before is not None and before[0] == listing:
                # The same listing: its tree is stored already.
                made[name] = before
            else:
                made[name] = listing, _folder(name, self.time_ns, self._writer.update_tree(b"", listing))
        return made


def _listing(
    entries: dict[str, Entry], folders: dict[bytes, tuple[dict[bytes, Entry], Entry]]
) -> dict[bytes, Entry]:
    """Return the entries of the top directory."""
    top = {entry.name: entry for path, entry in entries.items() if "/" not in path}
    return top | {name: entry for name, (_, entry) in folders.items()}


def _folder(name: bytes, time_ns: int, tree: TreeRef) -> Entry:
    """Return a directory's entry."""
    return Entry(
        name=name,
        mode=stat.S_IFDIR | 0o755,
        uid=os.getuid(),
        gid=os.getgid(),
        mtime_ns=time_ns,
        ctime_ns=time_ns,
        atime_ns=time_ns,
        content=tree.id,
        total_files=tree.total_files,
        total_bytes=tree.total_bytes,
    )


# Time for a restarting daemon to come back and hear how the trainer ended.
_UNREGISTER_SECONDS: Final = 30.0
# A save that waits longer for another writer has failed, and the next boundary tries again.
_LOCK_WAIT_SECONDS: Final = 60.0
# Time for housekeeping after the last message of the trainer, which waits for this process to exit.
_LAST_SECONDS: Final = 10.0
# Wait for the write lock where each rank stores its part: a writer waits for all writers before it.
_TURN_WAIT_SECONDS: Final = 3600.0
# Keeps a message below `MAX_MESSAGE_BYTES`.
_FILES_IN_A_MESSAGE: Final = 100
# Starting the process that uploads takes a fraction of a second; one that ends just then is waited for.
_UPLOAD_START_SECONDS: Final = 10.0
_AUTOGROUP: Final = "/proc/self/autogroup"


def main(fd: int, trainer_pid: int) -> None:
    """Run the process until the trainer is done or gone.

    Args:
        fd: This process's end of the socket pair.
        trainer_pid: Process id of the trainer.
    """
    # The trainer answers these signals; this process exits after it.
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    # Blocked since before this program was loaded (`client`). What has come meanwhile is ignored, too.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_ALL)
    # Nothing else would tell where a fault of a library ended it.
    with suppress(OSError, RuntimeError, ValueError):  # the trainer has closed its standard error
        faulthandler.enable()
    sock = socket.socket(fileno=fd)
    trainer = _Trainer(sock, trainer_pid)
    # Begin is the first message; a trainer that died before it has nothing to store.
    begin = trainer.next()
    if not isinstance(begin, Begin):
        return
    known = _DaemonRegistration(trainer, begin.watched) if begin.watched is not None else None
    _lower_priority(begin.nice)
    # Before the first snapshot only this tells how long one will take.
    trainer.tell(Measured(measure(begin.repository)))
    cloud_notices.watch(begin.services, trainer.notify, lambda text: trainer.tell(Note("no_notices", text)))
    _Writer(trainer, begin).run()
    if known is not None:
        known.trainer_gone()


class _Trainer:
    """Messages of the trainer, also those that it sent before it died."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.fds: deque[int] = deque()
        """Descriptors that came with the messages returned so far, and were not taken yet."""
        self.awaited = 0
        """Number of the newest save for which the training stands still."""
        self.at_once = 0
        """Number of the newest save for which there is time only to write it."""
        self._received: deque[tuple[FromTrainer, list[int]]] = deque()
        """Messages received and not returned yet, with their descriptors."""
        self._ended = False
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.pidfd = _pidfd_of(pid)
        """Pidfd of the trainer, or -1."""
        if self.pidfd >= 0:
            self._poll.register(self.pidfd, select.POLLIN)

    def next(self) -> FromTrainer | None:
        """Wait for the next message; None if the trainer is gone and all its messages were returned."""
        # The end of the socket alone does not tell that the trainer is gone: its children may have inherited
        # the other end.
        while not self.waiting():
            ready = dict(self._poll.poll())
            if self._sock.fileno() not in ready and self.pidfd in ready and not self.waiting():
                return None
        if not self._received:
            return None
        message, fds = self._received.popleft()
        self.fds.extend(fds)
        return message

    def waiting(self) -> bool:
        """Return whether a message is there, or the trainer is gone."""
        while not self._received and not self._ended and readable(self._sock.fileno()):
            self._receive()
        return bool(self._received) or self._ended

    def _receive(self) -> None:
        got = receive_from_trainer(self._sock)
        if got is None:
            self._ended = True
        elif isinstance(got[0], Awaited):
            # Acted on at once: it is about a save that is being stored now.
            self.awaited = got[0].number
            self.at_once = got[0].number if got[0].at_once else self.at_once
        else:
            self._received.append(got)

    def is_gone(self) -> bool:
        """Return whether the trainer's process has ended; False where the kernel does not tell."""
        return self.pidfd >= 0 and readable(self.pidfd)

    def has_failed(self) -> bool:
        """Return whether the trainer has ended, or said that it ends by an error."""
        # The last message may stand behind a further save.
        while not self._ended and readable(self._sock.fileno()):
            self._receive()
        return self.is_gone() or any(isinstance(one, Finish) and one.failed for one, _ in self._received)

    def stands_still(self, number: int) -> bool:
        """Return whether the trainer waits for a save after this one, or ends."""
        ends = self.waiting() and any(isinstance(one, Finish) for one, _ in self._received)
        return ends or self._ended or self.is_gone() or self.awaited > number

    def pause(self, seconds: float) -> None:
        """Wait for so many seconds, or until a message is there or the trainer is gone."""
        end = time.monotonic() + seconds
        while not (self.waiting() or self.is_gone()) and (left := end - time.monotonic()) > 0:
            self._poll.poll(1000 * left)

    @property
    def closing(self) -> bool:
        """True if the next message is the last one: the trainer waits for what it has staged."""
        return self.waiting() and bool(self._received) and isinstance(self._received[0][0], Finish)

    def tell(self, message: FromWriter) -> None:
        """Send a message; if the trainer is gone, print failures and notes."""
        try:
            send(self._sock, message)
        except OSError:
            if isinstance(message, (NotSaved, Note)):
                text = message.reason if isinstance(message, NotSaved) else message.text
                print(f"ciuic: {text}", file=sys.stderr, flush=True)  # noqa: T201

    def notify(self, event: cloud_notices.CloudNotice) -> None:
        """Send a preemption notice and signal it.

        Another thread may call this: the socket keeps messages whole.
        """
        self.tell(PreemptionNotice(event.text, event.seconds, event.certain))
        if self.pidfd >= 0:
            # SIGURG is ignored by default, so it harms no trainer that does not handle it. By pidfd: the pid
            # may be another process's by now.
            with suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGURG)


class _DaemonRegistration:
    """Registration of the trainer, renewed by a background thread until this process ends."""

    def __init__(self, trainer: _Trainer, hello: Hello) -> None:
        """Start the background thread.

        Args:
            trainer: connection to the trainer; the pidfd and the page that came with its first message are
                taken from it.
            hello: name, process and heartbeat of the trainer.
        """
        self._trainer = trainer
        # In the order of `TrainerHeartbeat.fds`.
        life, self._page = trainer.fds.popleft(), trainer.fds.popleft()
        self._heartbeat = hello.heartbeat_seconds > 0
        self._registration = Registration(
            lambda: watch_socket(os.environ), hello, (life, self._page), on_trouble=self._report_trouble
        )
        self._registration.start()

    def trainer_gone(self) -> None:
        """Tell the daemon how the trainer ended; waits only where a daemon was there before and is away."""
        # A daemon reports nothing of an end that was announced.
        if read_page(self._page).goodbye not in (Goodbye.CLOSED, Goodbye.PREEMPTED):
            self._registration.wait_until_known(_UNREGISTER_SECONDS)

    def _report_trouble(self, error: CiuicError) -> None:
        # A missing daemon is normal and not reported, unless heartbeat_seconds says that the user counts on
        # one.
        if self._heartbeat:
            text = f"not watched yet: {error}" if isinstance(error, Unreachable) else f"not watched: {error}"
            self._trainer.tell(Note("not_watched", text))


class _Writer:
    """Carries out the messages of a trainer."""

    def __init__(self, trainer: _Trainer, begin: Begin) -> None:
        self._trainer = trainer
        self._begin = begin
        self._arenas: dict[int, ReadArena] = {}
        # Of the last save.
        self._size_bytes = self._number = 0
        self._drop_caches()
        self._turns = CodingTurns(
            codecs.Trainer(
                has_message=lambda: trainer.waiting() or trainer.is_gone(),
                stands_still=lambda: trainer.stands_still(self._number),
                pause=trainer.pause,
            )
        )
        # Another process decides whether a part belongs to a snapshot, so a part must not become the base of
        # a difference.
        self._part_chooser = CodecChooser(begin.compression, None)
        self._housekeeping = WriterHousekeeping(
            begin.repository,
            begin.root,
            begin.rules,
            should_stop=trainer.waiting,
            is_busy=lambda: self._chooser.is_busy,
            tell=self._on_housekeeping_note,
            remotes=begin.uploads,
        )
        self._uploads = Uploads(
            begin.repository, begin.uploads, lambda text: trainer.tell(Note("not_uploaded", text))
        )

    def run(self) -> None:
        """Carry out messages until the last one, or until the trainer is gone."""
        while (message := self._trainer.next()) is not None and not isinstance(message, Finish):
            if isinstance(message, Attach):
                # A state that has grown comes in a larger arena of the same number.
                before = self._arenas.pop(message.arena, None)
                if before is not None:
                    before.close()
                self._arenas[message.arena] = ReadArena(self._trainer.fds.popleft())
            elif isinstance(message, SaveRequest):
                self._save(message)
        if message is not None:
            end = time.monotonic() + _LAST_SECONDS
            self._run_housekeeping(lambda: self._housekeeping.finish(_LAST_SECONDS))
            # Nobody waits for space while a trainer ends by an error, or has to be gone.
            if not message.failed and not self._trainer.at_once:
                self._run_housekeeping(
                    lambda: self._deltas.run(lambda: "soon" if time.monotonic() < end else "now")
                )
        self._uploads.finish(_UPLOAD_START_SECONDS)

    def _save(self, save: SaveRequest) -> None:
        claim = Claim(self._trainer.fds.popleft()) if save.claim else None
        asked = save.asking is not None and not save.asking.problem
        files = PairAnswer(save.asking, self._trainer.fds.popleft() if asked else None)
        try:
            saved = self._answer(save, files)
        finally:
            files.close()
            # Until the snapshot is made nothing is swept; a sweep would free parts that no snapshot refers to
            # yet.
            if claim is not None:
                claim.release()
        # After the answer: the arena is the trainer's again while old snapshots are removed.
        if saved:
            self._uploads.saved()
            self._run_housekeeping(self._housekeeping.after)
            self._run_housekeeping(self._code_earlier)

    def _answer(self, save: SaveRequest, files: PairAnswer) -> bool:
        """Carry out a save and answer it; return whether there is a new snapshot.

        Args:
            save: The request.
            files: Answer of the daemon about the files of the same instant.
        """
        began = time.monotonic()
        try:
            memory = self._arenas[save.arena].memory
            packed = memory[save.manifest_offset : save.manifest_offset + save.manifest_bytes]
            manifest = decode_msgpack(packed, Manifest)
            if not save.commit:
                self._store_part(save.number, memory, manifest, began)
                return False
            manifest = self._collect_parts(manifest)
            try:
                snapshot, waited = self._commit(save.number, memory, manifest, files)
            # A full disk: remove what is due to go, and try once more.
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # What housekeeping frees may be what the last snapshot was compared with.
                self._drop_caches()
                self._housekeeping.make_room()
                snapshot, waited = self._commit(save.number, memory, manifest, files)
        # Any exception: the training goes on, and this process must be there for the next save.
        except Exception as error:
            self._drop_caches()
            self._trainer.tell(NotSaved(number=save.number, reason=_text_of(error)))
            return False
        self._trainer.tell(
            Saved(
                number=save.number,
                id=str(snapshot.id),
                size_bytes=snapshot.size_bytes,
                new_bytes=snapshot.new_bytes,
                seconds=time.monotonic() - began,
                waited_seconds=waited,
                pair=snapshot.pair,
                pair_note=files.note,
            )
        )
        return True

    def _on_housekeeping_note(self, note: Note) -> None:
        if note.event == DAMAGE_NOTE:
            self._drop_caches()  # Otherwise the next snapshot would share what is damaged.
        self._trainer.tell(note)

    def _drop_caches(self) -> None:
        """Drop what is remembered of the repository, because it may not be true any more."""
        self._known = LastCommit()
        # "auto" leaves the newest state as it is; it is coded when the next one has come.
        later = self._begin.compression == "auto"
        self._chooser = CodecChooser(self._begin.compression, self._begin.rules, later=later)
        self._deltas = ReverseDeltas(self._begin.repository, self._begin.root, self._begin.rules)

    def _commit(
        self, number: int, memory: memoryview, manifest: Manifest, files: PairAnswer
    ) -> tuple[Snapshot, float]:
        """Make a snapshot; return it with the seconds spent waiting for idle processors."""
        with (
            Repository.open(self._begin.repository) as repository,
            repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="SnapshotManager") as writer,
        ):
            chosen = self._begin_coding(self._chooser, writer, number, manifest)
            snapshot = commit(
                repository, writer, memory, manifest, self._begin.root, self._known, chosen, files.pair
            )
            self._chooser.done(chosen)
            if self._chooser.later:
                self._deltas.saved(snapshot.id, chosen)
                # In packs of its own, so that its copies can go when it is coded. If this fails, the
                # snapshot is there all the same.
                with suppress(OSError):
                    writer.seal_packs(SEAL_FROM_BYTES)
            return snapshot, writer.waited_seconds

    def _code_earlier(self) -> None:
        """Code states before the newest, as far as the training spares the time."""
        self._turns.run(self._deltas, is_busy=self._chooser.is_busy, size_bytes=self._size_bytes)
        if not self._chooser.is_busy:
            self._chooser.measure_anew()

    def _begin_coding(
        self, chooser: CodecChooser, writer: Writer, number: int, manifest: Manifest
    ) -> CommitCodecs:
        trainer = self._trainer
        self._number = number
        self._size_bytes = sum(file.size_bytes for file in manifest.files)
        return chooser.begin(
            writer,
            size_bytes=self._size_bytes,
            in_a_hurry=lambda: (trainer.waiting() and not trainer.closing) or trainer.at_once >= number,
            awaited=lambda: trainer.closing or trainer.awaited >= number,
        )

    def _run_housekeeping(self, what: Callable[[], None]) -> None:
        try:
            what()
        except (CiuicError, OSError) as error:
            self._trainer.tell(Note("housekeeping_failed", _text_of(error)))

    def _collect_parts(self, manifest: Manifest) -> Manifest:
        """Wait for the other ranks' writers, and return the manifest with the files that they have stored.

        Raises:
            OSError: A writer has failed, or does not answer in time.
        """
        joint_save = manifest.joint_save
        if joint_save is None:
            return manifest
        try:
            # If this rank's trainer has ended, or fails and waits for this writer, the others may have ended
            # before their parts: they get seconds to begin, not minutes.
            stored = rank_parts.collect(self._begin.repository, joint_save, self._trainer.has_failed)
        finally:
            rank_parts.clear(self._begin.repository, joint_save.token)
        return msgspec.structs.replace(manifest, stored=[*manifest.stored, *stored])

    def _store_part(self, number: int, memory: memoryview, manifest: Manifest, began: float) -> None:
        joint_save = manifest.joint_save
        if joint_save is None:
            stored, new_bytes = self._store_files(number, memory, manifest)
            for first in range(0, len(stored), _FILES_IN_A_MESSAGE):
                self._trainer.tell(
                    StoredFiles(number=number, files=stored[first : first + _FILES_IN_A_MESSAGE])
                )
        else:
            with rank_parts.report_part(self._begin.repository, joint_save) as answer:
                try:
                    stored, new_bytes = self._store_files(number, memory, manifest)
                except Exception as error:
                    answer.failed(_text_of(error))
                    raise
                answer.stored(stored)
        self._trainer.tell(Put(number=number, new_bytes=new_bytes, seconds=time.monotonic() - began))

    def _store_files(
        self, number: int, memory: memoryview, manifest: Manifest
    ) -> tuple[list[StoredFile], int]:
        """Store the files of a part; return them with the growth of the repository in bytes."""
        with (
            Repository.open(self._begin.repository) as repository,
            repository.writer(wait_seconds=_TURN_WAIT_SECONDS, command="part of a snapshot") as writer,
        ):
            chosen = self._begin_coding(self._part_chooser, writer, number, manifest)
            stored = put_files(repository, writer, memory, manifest, chosen)
            self._part_chooser.done(chosen)
            return stored, writer.new_bytes


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__


def _pidfd_of(pid: int) -> int:
    """Return a descriptor that becomes readable when a process ends.

    -1 where the kernel has none (before Linux 5.3).
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _lower_priority(nice: int) -> None:
    """Lower the priority of this process below the training's."""
    with suppress(OSError):
        os.nice(nice)
    # With autogroups the kernel shares processors between sessions, and niceness counts only within one
    # (sched(7)).
    with suppress(OSError), open(_AUTOGROUP, "w") as file:
        file.write(str(nice))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
