"""Heartbeat page: shared memory in which a trainer shows that it is alive, and that others read without asking it.

The page is an anonymous file (memfd) that cannot shrink. A beat is three stores and no system call. Guarantees for the reader: a
descriptor that is no such page is refused, reading never waits and never faults, and every number is whole; two numbers may be
of two beats. The trainer can write anything there: the content is its own claim.

References:
    memfd_create(2), fcntl(2) (F_ADD_SEALS)
"""

from __future__ import annotations

import ctypes
import enum
import faulthandler
import fcntl
import mmap
import os
import signal
import struct
import sys
import time
from typing import ClassVar, Final, NamedTuple

_BYTES: Final = 4096
# "ciubeat1" as a little-endian number.
_MAGIC: Final = 0x31_74_61_65_62_75_69_63
_BEATS, _STEP, _TIME, _GOODBYE = 1, 2, 3, 4
_TEXT_AT: Final = 256
_TEXT_BYTES: Final = 512
_LOSSES: Final = 5
"""Word with the number of losses so far; the last ones are in a ring."""
_FAILED_SAVES, _FAILING_SINCE = 6, 7
_HUNG, _PID, _BUSY, _STACKS = 8, 9, 10, 11
_SAVE_ERROR_AT: Final = _TEXT_AT + _TEXT_BYTES
_SAVE_ERROR_BYTES: Final = 256
_RING_AT: Final = 1024
_RING_PLACES: Final = 128
_RING_BYTES: Final = 16 * _RING_PLACES
# Python has these names only if it was built with headers that have them; the numbers are those of
# linux/fcntl.h.
_ADD_SEALS: Final = getattr(fcntl, "F_ADD_SEALS", 1033)
_GET_SEALS: Final = getattr(fcntl, "F_GET_SEALS", 1034)
_SEAL_SHRINK: Final = 2
_WORDS: Final = struct.Struct("<12Q")
_WORD: Final = struct.Struct("<Q")
_LOSS: Final = struct.Struct("<Qd")
PAGE_NAME: Final = "ciuic-beat"
"""Name of the memfd, as links in /proc/PID/fd show it."""
STACKS_SIGNAL: Final = signal.SIGRTMAX - 5
"""Signal at which a trainer appends the stacks of its threads to its page; OpenJDK in the same process uses SIGRTMAX-2."""
_libc = ctypes.CDLL(None)
_ACTION_BYTES: Final = 256
"""More than struct sigaction of any C library."""


class Goodbye(enum.IntEnum):
    """End of the training, as the trainer reports it."""

    NONE = 0
    """Absence of a report: the training goes on, or the process was killed."""
    CLOSED = 1
    """The training is done."""
    PREEMPTED = 2
    """The training was told to end and has saved."""
    FAILED = 3
    """The training ended by an exception or with a failing status; the text says which."""


class HeartbeatReading(NamedTuple):
    """Content of a page at one moment."""

    beats: int = 0
    step: int = 0
    beat_ns: int = 0
    """Time of the last beat on the monotonic clock."""
    goodbye: Goodbye = Goodbye.NONE
    reason: str = ""
    failed_saves: int = 0
    """Saves that failed since the last one that succeeded; 0 on a page of an earlier version."""
    failing_since_ns: int = 0
    """Wall clock of the first of them, as the trainer claims."""
    save_error: str = ""
    """Why the last of them failed."""
    hung: bool = False
    """Whoever watches the trainer says that it hangs; ``reason`` says why."""
    pid: int = 0
    """Process that made the page, in its own pid namespace; 0 on a page of an earlier version."""
    busy: bool = False
    """A save, a restore or a wait for them is under way, in which there are no steps."""
    dumps: bool = False
    """`STACKS_SIGNAL` appends stacks to this page."""


# A page, not messages: a message could be lost, late, or forged at the end of a process, and sending one can wait. The last word of
# a process that was killed is what its page says.
class HeartbeatPage:
    """The trainer's side of the page.

    Raises:
        OSError: there is no memory for it.
    """

    _dumping: ClassVar[memoryview | None] = None
    """Words of the page of this process to which stacks are appended."""
    _handler: ClassVar[int] = 0
    """Address of the handler of faulthandler, once it was there."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _BYTES)
            # Sealed against shrinking: `check_page` refuses memory of which a reader could get less than it expects.
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SHRINK)
            self._map = mmap.mmap(self.fd, _BYTES)
            self._numbers = memoryview(self._map).cast("d")
        except BaseException:
            self.close()
            raise
        # Not written by struct, which stores byte by byte: a reader could find half a number.
        self._words = memoryview(self._map).cast("Q")
        self._words[0] = _MAGIC
        self._pid = self._words[_PID] = os.getpid()

    def beat(self, step: int | None = None) -> None:
        """Advance the heartbeat."""
        # 0.2 us a step, no system call and no lock: nothing in the training can wait for the daemon.
        words = self._words
        if step is not None and step >= 0:
            words[_STEP] = step
        words[_TIME] = time.monotonic_ns()
        words[_BEATS] += 1

    @property
    def has_beaten(self) -> bool:
        """True after the first beat."""
        return bool(self._words[_BEATS])

    def report_loss(self, step: int, loss: float) -> None:
        """Add the loss of a step, which may be no number. The reader sees the last 128."""
        count = self._words[_LOSSES]
        place = _RING_AT // 8 + 2 * (count % _RING_PLACES)
        # The values first, then the number that announces them.
        self._words[place] = max(0, step)
        self._numbers[place + 1] = loss
        self._words[_LOSSES] = count + 1

    def say_goodbye(self, how: Goodbye, reason: str = "") -> None:
        """Report the end of the training; NONE takes an earlier report back."""
        # A forked child inherits the page and must not report the end of its parent.
        if os.getpid() != self._pid:
            return
        # The text first, then the number that announces it.
        self._put_text(_TEXT_AT, _TEXT_BYTES, reason)
        self._words[_GOODBYE] = how

    def say_hung(self, reason: str) -> None:
        """Report that the trainer hangs, and why; "" takes that back."""
        self._put_text(_TEXT_AT, _TEXT_BYTES, reason)
        self._words[_HUNG] = bool(reason)

    def set_busy(self, busy: bool) -> None:
        """Record whether the trainer saves or restores, in which it makes no steps."""
        self._words[_BUSY] = busy

    def append_stacks_at_signal(self) -> None:
        """Have `STACKS_SIGNAL` append the stacks of all threads to the memory, behind the page.

        That works without the interpreter lock, and so in a trainer that hangs in a library. Does nothing where the
        program uses the signal.
        """
        # Not signal.getsignal(), which knows nothing of a library's handler.
        if _handler_of(_action()) not in (0, HeartbeatPage._handler):
            return
        os.lseek(self.fd, 0, os.SEEK_END)
        faulthandler.register(STACKS_SIGNAL, file=self.fd, all_threads=True)
        HeartbeatPage._handler = _handler_of(_action())
        before, HeartbeatPage._dumping = HeartbeatPage._dumping, self._words
        # A forked child shares the pages of its parent.
        if before is not None and before[_PID] == self._pid:
            before[_STACKS] = False
        self._words[_STACKS] = True

    def report_save(self, error: str = "") -> None:
        """Report the end of a save: durable, or failed with this reason."""
        if os.getpid() != self._pid:
            return
        failed = self._words[_FAILED_SAVES] + 1 if error else 0
        if failed:
            self._put_text(_SAVE_ERROR_AT, _SAVE_ERROR_BYTES, error)
        if failed == 1:
            self._words[_FAILING_SINCE] = time.time_ns()
        self._words[_FAILED_SAVES] = failed

    def _put_text(self, at: int, size_bytes: int, text: str) -> None:
        # The cut may split a character, which the reader replaces.
        data = text.encode("utf-8", "replace")[: size_bytes - 1]
        self._map[at : at + size_bytes] = data.ljust(size_bytes, b"\0")

    def close(self) -> None:
        """Close the descriptor. Later beats are seen through the descriptors of others."""
        # The mapping stays, so that a beat after the close is still a store into memory.
        fd, self.fd = self.fd, -1
        # First: the number of the descriptor may be a file's next.
        if HeartbeatPage._dumping is not None and HeartbeatPage._dumping is getattr(self, "_words", None):
            action = _action()
            faulthandler.unregister(STACKS_SIGNAL)
            HeartbeatPage._dumping = None
            # It puts back what was there at first, also over what the program has set since, whose next signal would end it.
            if _handler_of(action) != HeartbeatPage._handler:
                _libc.sigaction(STACKS_SIGNAL, action, None)
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    @property
    def goodbye(self) -> Goodbye:
        """The end that was reported last."""
        return Goodbye(self._words[_GOODBYE])


def _action() -> bytes:
    """Return the struct sigaction of `STACKS_SIGNAL` in this process."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _libc.sigaction(STACKS_SIGNAL, None, action)
    return action.raw


def _handler_of(action: bytes) -> int:
    """Return the address of the handler, the first member everywhere; 0 for the default."""
    return int.from_bytes(action[: struct.calcsize("P")], sys.byteorder)


def check_page(fd: int) -> None:
    """Check that a descriptor is a heartbeat page; reading a file of another kind could block for ever.

    Raises:
        ValueError: it is no heartbeat page.
    """
    try:
        # Before fstat(2), which would ask the server of a file on the sender's own FUSE mount: seals exist on
        # files of the kernel's memory only, and for everything else the kernel answers EINVAL by itself.
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        raise ValueError("the descriptor is not a memfd") from None
    if not seals & _SEAL_SHRINK or os.fstat(fd).st_size < _TEXT_AT + _TEXT_BYTES:
        raise ValueError("the memory is not sealed against shrinking")
    read_page(fd)


class LossReading(NamedTuple):
    """Losses of a page at one moment."""

    total: int = 0
    """Losses so far, with those that are gone from the ring."""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, loss) of those after the last reading that are in the ring, the oldest first."""


def read_losses(fd: int, seen: int) -> LossReading:
    """Return the losses of a page that came after the first ``seen`` ones; a page of an earlier version has none."""
    data = os.pread(fd, _RING_AT + _RING_BYTES, 0)
    # The trainer may have made the memory what it likes.
    if len(data) < _RING_AT + _RING_BYTES:
        return LossReading()
    (count,) = _WORD.unpack_from(data, 8 * _LOSSES)
    # A count that is less than the last one is of a trainer that began anew.
    new = min(count if count < seen else count - seen, _RING_PLACES)
    places = ((count - new + number) % _RING_PLACES for number in range(new))
    return LossReading(count, tuple(_LOSS.unpack_from(data, _RING_AT + 16 * place) for place in places))


def read_page(fd: int) -> HeartbeatReading:
    """Return the content of a page that `check_page` has accepted.

    Raises:
        ValueError: the page does not begin with the magic number.
    """
    # pread(2) instead of a mapping: no access of the reader can fault, whatever the trainer does with the memory.
    data = os.pread(fd, _SAVE_ERROR_AT + _SAVE_ERROR_BYTES, 0)
    magic, beats, step, beat_ns, goodbye, _, failed_saves, failing_since_ns, hung, pid, busy, dumps = (
        _WORDS.unpack_from(data)
    )
    if magic != _MAGIC:
        raise ValueError("the memory does not begin like a heartbeat page")
    # A newer trainer may report an end that this version does not know.
    known = Goodbye(goodbye) if goodbye <= max(Goodbye) else Goodbye.NONE
    reason = _text(data[_TEXT_AT:_SAVE_ERROR_AT])
    error = _text(data[_SAVE_ERROR_AT:]) if failed_saves else ""
    return HeartbeatReading(
        beats, step, beat_ns, known, reason, failed_saves, failing_since_ns, error, bool(hung), pid, bool(busy), bool(dumps)
    )  # fmt: skip


def read_stacks(fd: int, start: int) -> bytes:
    """Return the stacks that were appended to a page from this offset on, at most 256 KiB."""
    return os.pread(fd, 256 << 10, max(start, _BYTES))


def _text(data: bytes) -> str:
    text = data.partition(b"\0")[0].decode("utf-8", "replace")
    # Shown in logs and alerts: any user may have written it.
    return "".join(character if character.isprintable() else " " for character in text).strip()
