"""Client of the writer process: start it on demand, restart it after a failure, hand arenas over.

Guarantees: no call waits for the disk. The number of arenas is fixed (two, and more for small states); while the
writer holds all of them, none can be filled, and the caller decides whether to wait. A save that the writer had not
answered when it died is reported as not saved, by `poll` or by `close`; an answer that had been sent counts.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from ciuic.repository.locks import Claim
from ciuic.system.child_process import environment, module_command
from ciuic.system.poll import readable
from ciuic.system.processes import describe_exit
from ciuic.training.arena import Arena, allocate_arena
from ciuic.training.remote.uploads import store_variables
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
    Note,
    NotSaved,
    Put,
    Saved,
    SaveRequest,
    receive_from_writer,
    send,
)
from ciuic.training.writer.paired_files import PairRequest

_detached_writers: list[subprocess.Popen[bytes]] = []
"""Processes that finish what they were given while no client waits for them; polled so that they do not stay
zombies.
"""


def _start_writer(theirs: socket.socket, trainer_pid: int) -> subprocess.Popen[bytes]:
    """Start a writer process on its end of the socket pair.

    Raises:
        OSError: the process could not be started.
    """
    arguments = str(theirs.fileno()), str(trainer_pid)
    # Until the program that ignores them is loaded, half a second, any of these would end it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)
    try:
        return subprocess.Popen(
            module_command("ciuic.training.writer_process", *arguments),
            # With the credentials of stores, for the process that uploads, which the writer starts.
            env={**environment(of_trainer=True), **store_variables()},
            stdin=subprocess.DEVNULL,
            # stderr is inherited: with the trainer gone it is the only place left for messages.
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # A session of its own: a signal to the trainer's process group (Ctrl-C, kill -PGID) must not
            # end the writer.
            start_new_session=True,
            # The writer may outlive the job and must not keep its working directory busy.
            cwd="/",
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def detach(process: subprocess.Popen[bytes]) -> None:
    """Stop waiting for a process, and reap those detached earlier that have ended."""
    _detached_writers.append(process)
    # poll() reaps: an ended process stays a zombie until its parent asks.
    _detached_writers[:] = [one for one in _detached_writers if one.poll() is None]


# Arenas of a manager: the writer stores one while the trainer fills the other.
_ARENAS: Final = 2
# A commit takes tens of milliseconds however small the state is: two arenas would skip saves of tiny states whose
# steps are faster, and further ones cost next to no memory.
_SMALL_ARENAS: Final = 6
_SMALL_STATE_BYTES: Final = 4 << 20
_GROWTH_FACTOR: Final = 1.125
"""Factor by which a new arena exceeds the requested size, so that a state that grows a little needs no second
one.
"""
_GONE: Final = "the writer process is gone"
LOST_WRITER: Final = "writer_gone"
"""Event of the note that the writer has ended while it held no save."""
# The kernel closes the socket of a process that ends before its parent can wait for it.
_ENDING_SECONDS: Final = 0.05
FORKED: Final = "this process was forked from the one that made the SnapshotManager: it needs one of its own"
INTERRUPTED: Final = "interrupted while it was handed over"


class Slot:
    """An arena and its state of ownership."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arena: Arena | None = None
        self.known_to_writer = False
        self.save = 0
        """Number of the save for which the writer holds the arena; 0 if it does not."""
        self.staged: weakref.ref[memoryview] | None = None
        """Weak reference to the memory that the caller staged here and will submit later; while it is alive
        the slot is not free.
        """
        self.reserved = False
        """True while the caller is filling the arena."""
        self.layout: object = None
        """Cache of the caller that is valid for this arena only."""

    @property
    def is_free(self) -> bool:
        """True if neither the writer nor the caller uses the arena."""
        return not (self.save or self.reserved) and (self.staged is None or self.staged() is None)


class WriterClient:
    """Connection to one writer process. Not safe for use by several threads at once."""

    def __init__(
        self,
        begin: Begin,
        arenas: int = _ARENAS,
        *,
        small_arenas: int | None = None,
        begin_fds: tuple[int, ...] = (),
    ) -> None:
        """Prepare a client without starting the process.

        Args:
            begin: first message to every writer that is started.
            arenas: number of arenas for states of any size.
            small_arenas: number of further arenas, for states of up to 4 MiB; None: six.
            begin_fds: descriptors that are sent with `begin`.
        """
        self._begin = begin
        self._begin_fds = begin_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        further = _SMALL_ARENAS if small_arenas is None else small_arenas
        self.slots = [Slot(number) for number in range(arenas + further)]
        self._large = self.slots[:arenas]
        self._number = self._awaited = 0
        self._ended = False
        """True once the writer was told to end."""
        self._pid = os.getpid()
        self._unread: list[FromWriter] = []
        """Messages that were received or made up (for saves of a lost writer) and not yet returned by `poll`.
        """

    @property
    def repository(self) -> str:
        """Path of the repository that the writer process stores in."""
        return self._begin.repository

    @property
    def is_ours(self) -> bool:
        """True if this process created the client. A forked child must not use the parent's writer."""
        return os.getpid() == self._pid

    @property
    def pending(self) -> int:
        """Number of saves that were submitted and not answered."""
        return sum(1 for slot in self.slots if slot.save)

    @property
    def can_take(self) -> bool:
        """True if an arena is free for a state as large as those before it."""
        sizes = (slot.arena.size_bytes for slot in self.slots if slot.arena is not None)
        return any(slot.is_free for slot in self._slots_for(max(sizes, default=0)))

    @property
    def will_answer(self) -> bool:
        """True if a message can come: a writer is connected, or messages are unread."""
        return self.is_ours and (self._sock is not None or bool(self._unread))

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            OSError: the process could not be started, or this process is a forked child.
        """
        if not self.is_ours:
            raise OSError(errno.EPERM, FORKED)
        if self._sock is not None:
            return
        # SOCK_SEQPACKET: a message arrives whole or not at all, and carries descriptors.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = _start_writer(theirs, self._pid)
        except BaseException:
            ours.close()
            raise
        finally:
            # The child has a copy; with this one open, the end of the writer would never read as end of file.
            theirs.close()
        self._sock = ours
        self._ended = False
        for slot in self.slots:
            # A new process has mapped no arena.
            slot.known_to_writer = False
        self._send(self._begin, self._begin_fds)

    def _slots_for(self, size_bytes: int) -> list[Slot]:
        """Return the slots that may hold a state of this size."""
        return self.slots if size_bytes <= _SMALL_STATE_BYTES else self._large

    def free_slot(self, size_bytes: int, among: slice = slice(None)) -> Slot | None:
        """Return a slot that may be filled with `size_bytes`, or None while the writer holds all of them.

        Raises:
            OSError: ENOMEM, there is no memory for an arena of that size.
        """
        free = [slot for slot in self.slots[among] if slot.is_free]
        if not free:
            return None
        # Always the lowest free slot: a run whose saves are far apart then needs the memory of one arena.
        return self._ensure_arena(free[0], size_bytes)

    def reserve(self, size_bytes: int) -> Slot | None:
        """Return a slot as `free_slot` does, reserved until it is submitted or released.

        A signal handler of the program that saves in the middle of a save gets the other slot.

        Raises:
            OSError: ENOMEM, or EPERM in a forked child.
        """
        if not self.is_ours:
            raise OSError(errno.EPERM, FORKED)
        for slot in self._slots_for(size_bytes):
            if not slot.is_free:
                continue
            # Reserved first and checked again: between any two bytecodes a signal handler of the program may
            # run, and save.
            slot.reserved = True
            if slot.save:
                slot.reserved = False
                continue
            try:
                if (found := self._ensure_arena(slot, size_bytes)) is not None:
                    return found
            except BaseException:
                slot.reserved = False
                raise
            slot.reserved = False
        return None

    def release(self, slot: Slot) -> None:
        """Return a reserved slot that was not submitted."""
        slot.reserved = False

    def _ensure_arena(self, slot: Slot, size_bytes: int) -> Slot | None:
        """Give the slot an arena of at least `size_bytes`.

        Returns:
            The slot; None if there is no memory until the writer returns another arena.
        """
        if slot.arena is None or slot.arena.size_bytes < size_bytes:
            if slot.arena is not None:
                slot.arena.close()
            slot.arena, slot.layout, slot.known_to_writer = None, None, False
            with_spare = int(size_bytes * _GROWTH_FACTOR) if size_bytes >= 1 << 20 else 1 << 20
            try:
                slot.arena = allocate_arena(with_spare)
            except OSError:
                if self.pending:
                    # Another arena exists and will be free again: the caller may wait instead of failing.
                    return None
                raise
        return slot

    def prepare(self, size_bytes: int, also: Sequence[Callable[[Arena], None]] = ()) -> None:
        """Allocate an arena and fault its pages in on a background thread.

        The first save then costs what later ones do. A failure is ignored: the first save then allocates. The
        second arena is allocated when first needed, and that save stalls the training longer.

        Args:
            size_bytes: size of the arena.
            also: further preparations of the arena, run on the same thread (page-locking for devices).
        """
        with suppress(OSError):
            slot = self.reserve(size_bytes)
            if slot is not None:
                # RuntimeError: no further thread can be started.
                with suppress(RuntimeError):
                    if slot.arena is not None:
                        arguments = slot.arena, also
                        threading.Thread(
                            target=_prepare, args=arguments, name="ciuic-arena", daemon=True
                        ).start()
                # Although the thread still works: populating and locking pages changes nothing in them.
                self.release(slot)

    def next_number(self) -> int:
        """Return the number of a save that will be submitted later."""
        self._number += 1
        return self._number

    def submit(
        self,
        slot: Slot,
        manifest: Manifest,
        at: int,
        *,
        commit: bool = True,
        claim: Claim | None = None,
        pair_request: PairRequest | None = None,
        number: int | None = None,
    ) -> int:
        """Hand a filled arena over to the writer and return the number of the save.

        From here on the snapshot is made even if this process dies.

        Args:
            slot: the filled arena.
            manifest: files of the snapshot, by their position in the arena.
            at: offset in the arena with room for the encoded manifest.
            commit: False to store the files without making a snapshot.
            claim: claim on the repository; the writer owns it afterwards.
            pair_request: request to the daemon whose answer the writer reads.
            number: number from `next_number`, if one was taken beforehand.

        Raises:
            OSError: there is no writer and none could be started.
        """
        arena = slot.arena
        assert arena is not None
        # In the arena and not in the message: a message has 64 KiB at most, a manifest of many tensors more.
        packed = msgspec.msgpack.encode(manifest)
        arena.memory[at : at + len(packed)] = packed
        save = SaveRequest(
            number=self.next_number() if number is None else number,
            arena=slot.number,
            manifest_offset=at,
            manifest_bytes=len(packed),
            commit=commit,
            claim=claim is not None,
            asking=None if pair_request is None else pair_request.asking,
        )
        fds = (
            *(() if claim is None else (claim.fileno(),)),
            *(() if pair_request is None else pair_request.fds),
        )
        try:
            self._hand_over(slot, arena, save, fds)
        except (BrokenPipeError, ConnectionResetError):
            # The writer was killed just now; one retry starts another. The arena still has the content.
            self._hand_over(slot, arena, save, fds)
        if claim is not None:
            claim.hand_over()
        slot.reserved = False
        return save.number

    def _hand_over(self, slot: Slot, arena: Arena, save: SaveRequest, fds: tuple[int, ...]) -> None:
        """Send the arena, if the writer does not know it, and the save."""
        self.start()
        if not slot.known_to_writer:
            self._send(Attach(slot.number), (arena.fd,))
            slot.known_to_writer = True
        slot.save = save.number
        try:
            if self._sock is None:
                raise BrokenPipeError(_GONE)
            send(self._sock, save, fds)
        except OSError as error:
            # The caller sees the exception and still has the state: the save is not reported as lost.
            slot.save = 0
            if isinstance(error, (BrokenPipeError, ConnectionResetError)) and self._sock is not None:
                self._handle_lost_writer()
            raise
        except BaseException:
            # A signal handler of the program raised inside sendmsg(2): the writer may have received the save
            # or not. Disconnecting leaves the arena to it: nothing that it may be reading is overwritten.
            self._unread.append(NotSaved(number=save.number, reason=INTERRUPTED))
            self._disconnect()
            raise

    def awaited(self, *, at_once: bool = False) -> None:
        """Tell the writer that the training waits for all it was handed, so that it need not yield.

        Args:
            at_once: True if the process is about to end, so that nothing but durability counts (no codecs).
        """
        newest = max(slot.save for slot in self.slots)
        if newest and (newest > self._awaited or at_once):
            self._awaited = newest
            with suppress(OSError):  # a lost writer is reported by `poll`
                self._send(Awaited(newest, at_once))

    def listen(self, timeout_seconds: float) -> None:
        """Wait until `poll` has something to return, at most `timeout_seconds`."""
        sock = self._sock
        if sock is not None and not self._unread and (fd := sock.fileno()) >= 0:
            readable(fd, timeout_seconds)

    def poll(self, timeout_seconds: float = 0.0) -> list[FromWriter]:
        """Return the messages since the last call, waiting up to `timeout_seconds` for the first one."""
        # With something to return already, only what has arrived is added.
        while self.is_ours and self._receive(0 if self._unread else timeout_seconds):
            pass
        messages, self._unread = self._unread, []
        return messages

    def _receive(self, timeout_seconds: float) -> bool:
        """Receive the next message; return False where none has come, or where the writer is gone."""
        if self._sock is None or not readable(self._sock.fileno(), timeout_seconds):
            return False
        message = receive_from_writer(self._sock)
        if message is None:
            self._report_lost_writer()
            return False
        # Kept in a member before anything else runs: an exception from a signal handler must not lose it.
        self._unread.append(message)
        if isinstance(message, (Saved, NotSaved, Put)):
            self._answered(message.number)
        return True

    def close(self, timeout_seconds: float, *, failed: bool = False) -> list[FromWriter]:
        """Tell the writer to end and wait for pending saves.

        The writer finishes them and ends by itself if the time is not enough.

        Args:
            timeout_seconds: longest wait.
            failed: True if the program ends by an error.

        Returns:
            The messages received meanwhile.
        """
        messages: list[FromWriter] = []
        if not self.is_ours:
            return messages
        if self._sock is not None:
            self._ended = True
            with suppress(OSError):
                self._send(Finish(failed))
            end = time.monotonic() + timeout_seconds
            while self.pending and (left := end - time.monotonic()) > 0:
                messages += self.poll(left)
        # Also where nothing is pending: `Finish` may have met a writer that was killed, with all it was given.
        messages += self.poll()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_seconds)
            self._detach_process()
        for slot in self.slots:
            # A reserved arena may still be written to by a device or by an outer frame; its memory stays.
            if slot.arena is not None and not slot.reserved:
                slot.arena.close()
                slot.arena = None
        return messages

    def _send(self, message: FromTrainer, fds: tuple[int, ...] = ()) -> None:
        if self._sock is None:
            raise BrokenPipeError(_GONE)
        try:
            send(self._sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self._handle_lost_writer()
            raise

    def _answered(self, number: int) -> None:
        """Return the arena of an answered save to the free ones."""
        for slot in self.slots:
            if slot.save == number:
                slot.save = 0

    def _handle_lost_writer(self) -> None:
        """Receive what the writer had sent before it was lost, and report what it still held as not saved."""
        while self._receive(0):
            pass
        if self._sock is not None:
            self._report_lost_writer()

    def _report_lost_writer(self) -> None:
        """Report what the writer held as not saved, and disconnect."""
        reason = _GONE + self._ending()
        lost = [NotSaved(number=slot.save, reason=reason) for slot in self.slots if slot.save]
        self._unread.extend(lost or ([] if self._ended else [Note(LOST_WRITER, reason)]))
        self._disconnect()

    def _ending(self) -> str:
        """Return how the process has ended, in brackets; nothing where that is not known at once."""
        if self._process is None:
            return ""
        try:
            status = self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return f" ({describe_exit(status)})"

    def _detach_process(self) -> None:
        """Stop waiting for the process."""
        if self._process is not None:
            detach(self._process)
            self._process = None

    def _disconnect(self) -> None:
        """Close the connection.

        The writer finishes what it has, in arenas that this client no longer maps.
        """
        for slot in self.slots:
            # The lost writer may still be reading these arenas; later saves get new ones.
            if slot.save and slot.arena is not None:
                slot.arena.close()
                slot.arena, slot.layout = None, None
            slot.save, slot.known_to_writer = 0, False
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if not self._ended:  # otherwise `close` waits for the process
            self._detach_process()


def _prepare(arena: Arena, also: Sequence[Callable[[Arena], None]]) -> None:
    """Fault the arena's pages in, then run the further preparations."""
    arena.make_present()
    for one in also:
        one(arena)


def manifest_files(files: Iterable[tuple[str, int, int, int]]) -> list[ManifestFile]:
    """Return files of (path, offset, size in bytes, bytes per number) as a manifest lists them."""
    return [ManifestFile(*file) for file in files]
