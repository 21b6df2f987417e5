"""The trainer's side of the writer process: it is started when first needed, and again when it is gone.

Guarantees: nothing here waits for the disk. Two arenas are there at most; while the writer has both, there is none to fill, and the
caller decides whether to wait. What the writer had not answered when it died counts as not saved.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from ciuic.child_process import environment, module_command
from ciuic.readiness import readable
from ciuic.repository.claim import Claim
from ciuic.training.arena import Arena
from ciuic.training.filesystem import Asked
from ciuic.training.memory import memory_left
from ciuic.training.messages import (
    Attach,
    Awaited,
    Begin,
    End,
    File,
    FromTrainer,
    FromWriter,
    Manifest,
    Note,
    NotSaved,
    Put,
    Save,
    Saved,
    receive_from_writer,
    send,
)

_ARENAS: Final = 2
_SPARE: Final = 1.125
"""A new arena is so much larger than what it is made for: a state that grows a little should not need another."""
GONE: Final = "the writer process is gone"
FORKED: Final = "this process was forked from the one that made the SnapshotManager: it needs one of its own"
_left_behind: list[subprocess.Popen[bytes]] = []
"""Writers that have something to finish and nobody who waits for it."""
INTERRUPTED: Final = "interrupted while it was handed over"


class Slot:
    """One arena and who has it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arena: Arena | None = None
        self.known_to_writer = False
        self.save = 0
        """The save for which the writer has it, or 0."""
        self.staged: weakref.ref[memoryview] | None = None
        """What the caller staged in it and will submit later looks at this memory: as long as anything does, it is not free."""
        self.reserved = False
        """It is being filled."""
        self.layout: object = None
        """Whatever the caller has put there: good for this arena."""

    @property
    def is_free(self) -> bool:
        return not (self.save or self.reserved) and (self.staged is None or self.staged() is None)


class WriterClient:
    """Not for several threads at once."""

    def __init__(self, begin: Begin, arenas: int = _ARENAS, *, begin_fds: tuple[int, ...] = ()) -> None:
        self._begin = begin
        self._begin_fds = begin_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self.slots = [Slot(number) for number in range(arenas)]
        self._number = self._awaited = 0
        self._ended = False
        """It was told to end."""
        self._pid = os.getpid()
        self._unheard: list[FromWriter] = []
        """What became of saves whose writer was found to be gone."""

    @property
    def repository(self) -> str:
        """Its path."""
        return self._begin.repository

    @property
    def is_ours(self) -> bool:
        """False in a forked child: it has no business with the parent's writer."""
        return os.getpid() == self._pid

    @property
    def pending(self) -> int:
        """Saves that were not answered yet."""
        return sum(1 for slot in self.slots if slot.save)

    @property
    def can_take(self) -> bool:
        """Whether there is an arena to fill."""
        return any(slot.is_free for slot in self.slots)

    @property
    def will_answer(self) -> bool:
        """Whether there is anything to wait for."""
        return self.is_ours and (self._sock is not None or bool(self._unheard))

    def start(self) -> None:
        """Starts the process unless it runs. OSError, also in a forked child."""
        if not self.is_ours:
            raise OSError(errno.EPERM, FORKED)
        if self._sock is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            arguments = str(theirs.fileno()), str(self._pid)
            self._process = subprocess.Popen(
                module_command("ciuic.training.writer_process", *arguments),
                env=environment(of_trainer=True),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._sock = ours
        self._ended = False
        for slot in self.slots:
            slot.known_to_writer = False
        self._send(self._begin, self._begin_fds)

    def free_slot(self, size_bytes: int, among: slice = slice(None)) -> Slot | None:
        """One that may be filled, with room for so much; None while the writer has all. OSError (ENOMEM)."""
        free = [slot for slot in self.slots[among] if slot.is_free]
        if not free:
            return None
        # The smallest number: a run whose saves are far apart needs the memory of one.
        return self._fit(free[0], size_bytes)

    def reserve(self, size_bytes: int) -> Slot | None:
        """As `free_slot`, and nobody else's until it is submitted or `release`d: a signal handler of the program's that saves in
        the middle of a save gets the other one."""
        if not self.is_ours:
            raise OSError(errno.EPERM, FORKED)
        for slot in self.slots:
            if not slot.is_free:
                continue
            slot.reserved = True
            if slot.save:  # such a handler came in between
                slot.reserved = False
                continue
            try:
                if (found := self._fit(slot, size_bytes)) is not None:
                    return found
            except BaseException:
                slot.reserved = False
                raise
            slot.reserved = False
        return None

    def release(self, slot: Slot) -> None:
        """It was not submitted after all."""
        slot.reserved = False

    def _fit(self, slot: Slot, size_bytes: int) -> Slot | None:
        if slot.arena is None or slot.arena.size_bytes < size_bytes:
            if slot.arena is not None:
                slot.arena.close()
            slot.arena, slot.layout, slot.known_to_writer = None, None, False
            with_spare = int(size_bytes * _SPARE) if size_bytes >= 1 << 20 else 1 << 20
            try:
                slot.arena = _arena(with_spare)
            except OSError:
                if self.pending:
                    return None  # there is one, and it will be free again
                raise
        return slot

    def prepare(self, size_bytes: int, also: Sequence[Callable[[Arena], None]] = ()) -> None:
        """Makes an arena for so much, and its memory present in a thread, and then does ``also`` what else there is to do of that kind:
        the first save then costs what every later one does.

        Failing is no matter. The second arena comes when it is needed, and stands the training still for longer that once.
        """
        with suppress(OSError):
            slot = self.reserve(size_bytes)
            if slot is not None:
                if slot.arena is not None:
                    arguments = slot.arena, also
                    threading.Thread(target=_prepare, args=arguments, name="ciuic-arena", daemon=True).start()
                self.release(slot)

    def next_number(self) -> int:
        """Of a save that will be submitted later."""
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
        asked: Asked | None = None,
        number: int | None = None,
    ) -> int:
        """Hands a filled arena over; returns the number of the save. ``at``: where in it there is room for the manifest.

        From here on the snapshot comes to be whatever happens to this process. Without ``commit`` the files are stored and there is no
        snapshot. ``claim``: becomes the writer's. ``asked``: whose answer the writer reads. OSError when there is no writer.
        """
        arena = slot.arena
        assert arena is not None
        packed = msgspec.msgpack.encode(manifest)
        arena.memory[at : at + len(packed)] = packed
        save = Save(
            number=self.next_number() if number is None else number,
            arena=slot.number,
            manifest_offset=at,
            manifest_bytes=len(packed),
            commit=commit,
            claim=claim is not None,
            asking=None if asked is None else asked.asking,
        )
        fds = (*(() if claim is None else (claim.fileno(),)), *(() if asked is None else asked.fds))
        try:
            self._hand_over(slot, arena, save, fds)
        except (BrokenPipeError, ConnectionResetError):  # somebody killed it just now
            self._hand_over(slot, arena, save, fds)
        if claim is not None:
            claim.hand_over()
        slot.reserved = False
        return save.number

    def _hand_over(self, slot: Slot, arena: Arena, save: Save, fds: tuple[int, ...]) -> None:
        self.start()
        if not slot.known_to_writer:
            self._send(Attach(slot.number), (arena.fd,))
            slot.known_to_writer = True
        slot.save = save.number
        try:
            self._send(save, fds)
        except OSError:
            slot.save = 0
            raise
        except BaseException:
            # A handler of the program's has raised: whether the writer got it nobody knows. What it may read is not filled again.
            self._unheard.append(NotSaved(number=save.number, reason=INTERRUPTED))
            self._part()
            raise

    def awaited(self, *, at_once: bool = False) -> None:
        """The training stands still until what it has handed over is durable: the writer need not give way to it. ``at_once``: nor is
        there time for anything but that."""
        newest = max(slot.save for slot in self.slots)
        if newest and (newest > self._awaited or at_once):
            self._awaited = newest
            with suppress(OSError):  # `poll` will say so
                self._send(Awaited(newest, at_once))

    def listen(self, timeout_seconds: float) -> None:
        """Waits so long for something to `poll`."""
        sock = self._sock
        if sock is not None and not self._unheard and (fd := sock.fileno()) >= 0:
            readable(fd, timeout_seconds)

    def poll(self, timeout_seconds: float = 0.0) -> list[FromWriter]:
        """What the writer has said since; waits so long for the first of it."""
        while self.is_ours and self._sock is not None:
            if not readable(self._sock.fileno(), 0 if self._unheard else timeout_seconds):
                break
            message = receive_from_writer(self._sock)
            if message is None:
                self._lose()
                break
            self._unheard.append(message)  # nothing that a handler raises later on makes it unheard of
            if isinstance(message, (Saved, NotSaved, Put)):
                self._answered(message.number)
        said, self._unheard = self._unheard, []
        return said

    def close(self, timeout_seconds: float) -> list[FromWriter]:
        """Lets the writer finish, so long; what it said. It ends by itself also if that is not enough."""
        said: list[FromWriter] = []
        if not self.is_ours:
            return said
        if self._sock is not None:
            self._ended = True
            with suppress(OSError):
                self._send(End())
            end = time.monotonic() + timeout_seconds
            while self.pending and (left := end - time.monotonic()) > 0:
                said += self.poll(left)
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_seconds)
            self._leave_behind()
        for slot in self.slots:
            if slot.arena is not None and not slot.reserved:
                slot.arena.close()
                slot.arena = None
        return said

    def _send(self, message: FromTrainer, fds: tuple[int, ...] = ()) -> None:
        if self._sock is None:
            raise BrokenPipeError(GONE)
        try:
            send(self._sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            if isinstance(message, Save):
                self._answered(message.number)  # who hands it over knows, and still has what is to be saved
            self._lose()
            raise

    def _answered(self, number: int) -> None:
        for slot in self.slots:
            if slot.save == number:
                slot.save = 0

    def _lose(self) -> None:
        """The writer is gone with what it had."""
        lost = [NotSaved(number=slot.save, reason=GONE) for slot in self.slots if slot.save]
        self._unheard.extend(lost or ([] if self._ended else [Note("writer_gone", GONE)]))
        self._part()

    def _leave_behind(self) -> None:
        """The process ends by itself; it is looked after so long, so that it does not stay a zombie."""
        if self._process is not None:
            _left_behind.append(self._process)
            self._process = None
        _left_behind[:] = [one for one in _left_behind if one.poll() is None]

    def _part(self) -> None:
        """From here on the writer is on its own; it finishes what it has, in memory that is its own from now on."""
        for slot in self.slots:
            if slot.save and slot.arena is not None:
                slot.arena.close()
                slot.arena, slot.layout = None, None
            slot.save, slot.known_to_writer = 0, False
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if not self._ended:  # else `close` waits for its end
            self._leave_behind()


def _prepare(arena: Arena, also: Sequence[Callable[[Arena], None]]) -> None:
    arena.make_present()
    for one in also:
        one(arena)


def _arena(size_bytes: int) -> Arena:
    """OSError (ENOMEM) also where filling it would get somebody killed."""
    left = memory_left()
    if left is not None and size_bytes > left:
        raise OSError(
            errno.ENOMEM, f"not enough memory for a copy of the state: {size_bytes >> 20} MiB of {left >> 20}"
        )
    return Arena(size_bytes)


def files_of(files: Iterable[tuple[str, int, int, int]]) -> list[File]:
    """As a manifest has them."""
    return [File(*file) for file in files]
