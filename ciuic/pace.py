"""Pace of work beside the job: the disk's speed while nobody else waits for it, and next to nothing while somebody does.

The idle I/O class does nothing under the `none` scheduler, so background work listens. Between pieces of work it pauses, and what
/proc/pressure/io counts during a pause, others have waited: the process itself sleeps. The overlay's own figure (how long requests
of the job have waited there) counts at all times, for none of them is ours. So does what others have written into the page cache,
which is what the kernel counts less what this process has: a checkpoint that is being saved waits for nothing until memory is full
of it. While somebody waits or writes, the *share* of the time that is spent working falls to a quarter, several times within a
second. Otherwise it doubles, from the least to the whole disk in half a second.

Guarantees: the share never falls below the least one of the terms (ciuic.urgency), which rises until the deadline, so that the
work ends. Time in which the process is ready to run and waits for a processor is no work: at nice 19 beside busy processes it is
99 % of the time, and pauses in proportion to it made a capture of seconds last for hours. The whole disk is used but for the
pauses, a twentieth of the time. Where nothing can be listened to, nothing is slowed down.
"""

from __future__ import annotations

import glob
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ciuic.precedence import Precedence
from ciuic.urgency import MIN_SHARE, Urgency

WAITS_SUFFIX: Final = ".waits"
"""Beside a worker's control socket: a file of one u64, microseconds in which requests of the job have waited there."""
_PRESSURE: Final = "/proc/pressure/io"
_WAITS: Final = struct.Struct("<Q")

_VMSTAT: Final = "/proc/vmstat"
_OWN_IO: Final = "/proc/self/io"
_SCHEDSTAT: Final = "/proc/self/schedstat"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_BUSY_WAITING: Final = 0.05
"""Share of the time that others wait from which on we slow down. Below it are the machine's own habits: logs, commits."""
_BUSY_WRITING: Final = 128 << 20
"""Bytes per second that others write: what a stream of them does is felt (p99 of its writes 1.2 times as long), while logs stay
far below."""
_QUIET: Final = 0.2
"""Of either: so little that it goes faster again."""
_FALL: Final = 4
_RISE: Final = 2
_WORK_SECONDS: Final = 0.1
_SHORT_WORK_SECONDS: Final = 0.01
"""The pieces of work between two pauses, while the share is whole and while it is not."""
_FIRST_WORK_SECONDS: Final = 0.03
"""Before the first pause: a snapshot of a few changes is over by then, and larger ones need not begin by being in the way."""
_LISTEN_SECONDS: Final = 0.005
_SLICE_SECONDS: Final = 0.05
_MOST_COUNTED_SECONDS: Final = 0.5
"""A longer piece of work counts as this long: a pause must not last for minutes because one fsync did for seconds."""


class Gauge(NamedTuple):
    """Something that counts for how long others have waited, or what they have written."""

    read: Callable[[], float]
    """Seconds, or bytes, so far; OSError and ValueError where it is gone."""
    counts_us: bool
    """What we do is in it as well: it says something only while we sleep."""
    busy_at: float = _BUSY_WAITING
    """What it counts in a second of busy others."""


class PaceState(NamedTuple):
    """What the pace does, for people to look at."""

    share: float = 1.0
    """Share of the time that is worked in."""
    least_share: float = 0.0
    """Share below which it does not fall now."""
    waiting: float = 0.0
    """Share of the time in which others lately waited for the disk."""
    writing: float = 0.0
    """Bytes per second that others lately wrote."""
    paused_seconds: float = 0.0


class Pace:
    """Pace of one process. Call ``step`` between any two pieces of work; threads that come during a pause wait for its end.

    ``on_pause`` is called several times a second during a pause, and ends it by raising.
    """

    def __init__(
        self,
        gauges: Sequence[Gauge],
        *,
        min_share: float = MIN_SHARE,
        urgency: Urgency | None = None,
        on_pause: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        we_wait: Callable[[], bool] | None = None,
        processor_waits: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Begin to work.

        Args:
            gauges: what to listen to; none: nothing is slowed down.
            min_share: least share at the beginning, where there is no deadline.
            urgency: terms instead of ``min_share``; `urge` changes them.
            processor_waits: seconds for which the calling thread has waited for a processor so far (`processor_waits`).
        """
        self._ears = [_Ear(gauge) for gauge in gauges]
        self._on_pause = on_pause
        self._clock = clock
        self._sleep = sleep
        self._we_wait = we_wait or other_threads_wait
        self._share = 1.0
        self._waiting = self._writing = 0.0
        self._paused_seconds = 0.0
        self._processor_waits = processor_waits
        # One attribute, so that a thread that urges and one that works see terms and time together.
        self._terms = (urgency or Urgency(min_share=min_share), clock())
        self._since = clock() - (_WORK_SECONDS - _FIRST_WORK_SECONDS)
        self._waited_for_processor = processor_waits()
        self._lock = threading.Lock()

    @property
    def state(self) -> PaceState:
        return PaceState(
            max(self._share, self.least_share),
            self.least_share,
            self._waiting,
            self._writing,
            self._paused_seconds,
        )

    @property
    def least_share(self) -> float:
        """Share below which the work does not fall now."""
        urgency, since = self._terms
        return urgency.least_share(self._clock() - since)

    def urge(self, urgency: Urgency) -> None:
        """Take new terms. Any thread; a pause that goes on is shortened to what they say within a twentieth of a second."""
        self._terms = (urgency, self._clock())

    def step(self) -> None:
        """Pause if it is time to. Costs a tenth of a microsecond if it is not."""
        if self._worked() < 0:
            return
        with self._lock:
            worked = self._worked()
            if worked >= 0:
                waited = self._processor_waits()
                if self._ears and self.least_share < 1:
                    worked = max(0.0, worked - max(0.0, waited - self._waited_for_processor))
                    self._pause(min(worked, _MOST_COUNTED_SECONDS))
                    waited = self._processor_waits()
                self._waited_for_processor = waited
                self._since = self._clock()

    def _worked(self) -> float:
        """Seconds since the last pause; negative while none is due."""
        worked = self._clock() - self._since
        return worked if worked >= (_WORK_SECONDS if self._share >= 1 else _SHORT_WORK_SECONDS) else -1.0

    def _pause(self, worked: float) -> None:
        began, paused_before = self._clock(), self._paused_seconds
        owed = _LISTEN_SECONDS
        while owed > 0:
            self._listen(min(max(owed, _LISTEN_SECONDS), _SLICE_SECONDS))
            paused = self._clock() - began
            self._paused_seconds = paused_before + paused
            self._on_pause()
            self._share = max(
                self._share, self.least_share
            )  # also where nothing was heard: `urge` ends a pause
            owed = worked * (1 / self._share - 1) - paused

    def _listen(self, seconds: float) -> None:
        """Sleeps for so long, and judges by what was to be heard."""
        began, waited_before = self._clock(), self._we_wait()
        for ear in self._ears:
            ear.begin(began)
        self._sleep(seconds)
        now, we_waited = self._clock(), self._we_wait() or waited_before
        heard = [
            (ear.gauge.busy_at, rate)
            for ear in self._ears
            if not (we_waited and ear.gauge.counts_us) and (rate := ear.heard(now)) is not None
        ]
        if heard:
            self._judge(max(rate / busy_at for busy_at, rate in heard))
            waiting = max(
                (min(1.0, rate) for busy_at, rate in heard if busy_at == _BUSY_WAITING), default=0.0
            )
            writing = max((rate for busy_at, rate in heard if busy_at == _BUSY_WRITING), default=0.0)
            self._waiting += (waiting - self._waiting) / 4
            self._writing += (writing - self._writing) / 4

    def _judge(self, level: float) -> None:
        if level > 1:
            self._share = max(self.least_share, self._share / _FALL)
        elif level < _QUIET:
            self._share = min(1.0, self._share * _RISE)


class _Ear:
    """One gauge, and what it said last."""

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self._value: float | None = None
        self._at = 0.0

    def begin(self, now: float) -> None:
        if self.gauge.counts_us or self._value is None:
            self._value, self._at = self._read(), now

    def heard(self, now: float) -> float | None:
        """What it counted per second since it was listened to last; None where it says nothing."""
        before, value, seconds = self._value, self._read(), now - self._at
        self._value, self._at = value, now
        if before is None or value is None or value < before or seconds <= 0:
            return None
        return (value - before) / seconds

    def _read(self) -> float | None:
        try:
            return self.gauge.read()
        except (OSError, ValueError):
            return None


def yield_to_others(io_priority: str, share: float = MIN_SHARE) -> Precedence:
    """Make the calling process, with the threads it starts later, wait for others; return the place that it has, to be changed.

    Call it before privileges are given up. ValueError for an I/O priority that means nothing.
    """
    precedence = Precedence(io_priority)
    precedence.take(share)
    return precedence


def processor_waits() -> Callable[[], float]:
    """Return a function that tells for how many seconds the main thread has been ready to run and waited for a processor.

    To be called before privileges are given up. Zero where the kernel does not say (CONFIG_SCHED_INFO).
    """
    try:
        schedstat = _Descriptor(_SCHEDSTAT)
    except OSError:
        return lambda: 0.0

    def read() -> float:
        # "RAN_NS WAITED_NS SLICES" (kernel, Documentation/scheduler/sched-stats.rst)
        fields = os.pread(schedstat.fd, 256, 0).split()
        return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0

    return read


class _Descriptor:
    """Descriptor that is open for reading as long as something refers to it."""

    def __init__(self, path: str, flags: int = 0) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def gauges(waits: Iterable[str]) -> list[Gauge]:
    """What there is to listen to on this machine: the kernel's figure, where it keeps one, and the workers' at ``waits``.

    To be called before privileges are given up. The descriptors stay open as long as the gauges.
    """
    found = []
    with suppress(OSError, ValueError):
        pressure = _Descriptor(_PRESSURE)
        _pressure_seconds(pressure.fd)  # EOPNOTSUPP where the kernel was told not to keep it
        found.append(Gauge(lambda: _pressure_seconds(pressure.fd), counts_us=True))
    with suppress(OSError, ValueError):
        vmstat, own = _Descriptor(_VMSTAT), _Descriptor(_OWN_IO)
        _written_by_others(vmstat.fd, own.fd)
        found.append(
            Gauge(lambda: _written_by_others(vmstat.fd, own.fd), counts_us=False, busy_at=_BUSY_WRITING)
        )
    for path in waits:
        with suppress(OSError, ValueError):
            file = _Descriptor(path, os.O_NOFOLLOW)
            found.append(Gauge(lambda file=file: _waits_seconds(file.fd), counts_us=False))  # type: ignore[misc]
    return found


def audible(waits: Iterable[str]) -> list[str]:
    """What of ``gauges`` there is just now, by name: `pressure`, `writes`, `requests`."""
    found = []
    with suppress(OSError, ValueError), open(_PRESSURE, "rb") as pressure:
        _pressure_seconds(pressure.fileno())
        found.append("pressure")
    with suppress(OSError, ValueError), open(_VMSTAT, "rb") as vmstat, open(_OWN_IO, "rb") as own:
        _written_by_others(vmstat.fileno(), own.fileno())
        found.append("writes")
    for path in waits:
        with suppress(OSError, ValueError), open(path, "rb") as file:
            _waits_seconds(file.fileno())
            return [*found, "requests"]
    return found


def waits_files(runtime_dir: str) -> list[str]:
    """Those of all workers that have their control sockets there."""
    return glob.glob(os.path.join(glob.escape(runtime_dir), f"worker-*{WAITS_SUFFIX}"))


def other_threads_wait() -> bool:
    """Whether a thread of this process other than the calling one waits for a disk right now."""
    if threading.active_count() == 1:
        return False
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] == b"D":
                return True
    return False


def _pressure_seconds(fd: int) -> float:
    """`some avg10=… total=MICROSECONDS`, the first line: at least one task waited for I/O."""
    line = os.pread(fd, 256, 0).partition(b"\n")[0]
    return int(line.rpartition(b"total=")[2]) / 1e6


def _written_by_others(vmstat: int, own: int) -> float:
    """Bytes that others have dirtied in the page cache; `nr_dirtied` counts pages, and `write_bytes` the same for us.

    The kernel keeps back at most 125 pages of each processor, so what is written is in the figure at once but for that; and a
    file system dirties a few pages of its own in the name of whoever writes.
    """
    pages = os.pread(vmstat, 1 << 16, 0).partition(b"\nnr_dirtied ")[2].partition(b"\n")[0]
    ours = os.pread(own, 4096, 0).partition(b"\nwrite_bytes: ")[2].partition(b"\n")[0]
    return float(int(pages) * _PAGE_BYTES - int(ours))


def _waits_seconds(fd: int) -> float:
    data = os.pread(fd, _WAITS.size, 0)
    if len(data) < _WAITS.size:
        raise ValueError("the file is empty")
    return float(_WAITS.unpack(data)[0]) / 1e6
