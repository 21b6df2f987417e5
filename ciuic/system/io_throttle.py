"""Throttle background work: full speed while no other process waits for the disk, and nearly none while one does.

The idle I/O class has no effect under the `none` scheduler, so background work measures. Between pieces of work it pauses. What
/proc/pressure/io counts during a pause is the waiting of others, because this process sleeps. The overlay's own figure (how long
requests of the job have waited there) counts at all times, because no request is from this process. So does what others have
written to the page cache, which is the kernel's count less that of this process: a checkpoint that is being saved does not wait for
the disk until memory is full. While others wait or write, the *share* of the time that is spent working falls to a quarter, several
times within a second. Otherwise it doubles, from the least share to the whole disk in half a second.

Guarantees: the share never falls below the least share of the terms (ciuic.system.urgency), which rises until the deadline, so that
the work ends. Time in which the process is ready to run and waits for a processor does not count as work: at nice 19 beside busy
processes it is 99 % of the time, and pauses in proportion to it made a capture of seconds last for hours. On a quiet machine only
the pauses are lost, a twentieth of the time. Where nothing can be measured, nothing is throttled.
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

from ciuic.system.precedence import Precedence
from ciuic.system.urgency import MIN_SHARE, Urgency

WAITS_SUFFIX: Final = ".waits"
"""Suffix of the file beside a worker's control socket: one u64, the microseconds for which requests of the job have waited."""
_PRESSURE: Final = "/proc/pressure/io"
_WAITS: Final = struct.Struct("<Q")

_VMSTAT: Final = "/proc/vmstat"
_OWN_IO: Final = "/proc/self/io"
_SCHEDSTAT: Final = "/proc/self/schedstat"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

# Share of the time that others wait from which on the work is throttled. The machine's own logs and commits stay below it.
_BUSY_WAITING: Final = 0.05
# Bytes per second of others from which on the work is throttled. A capture beside such a stream is felt there (p99 of the
# stream's writes 1.2 times as long), while logs stay far below.
_BUSY_WRITING: Final = 128 << 20
# Part of these limits below which the share rises again.
_QUIET: Final = 0.2
# The share falls faster than it rises: the job has the disk within some tenths of a second, and the work has
# it back within half a second (docs/daemon.md).
_FALL: Final = 4
_RISE: Final = 2
# Work between two pauses, while the share is whole and while it is not: with pauses of _MEASURE_SECONDS, a
# twentieth of the time is lost on a quiet machine.
_WORK_SECONDS: Final = 0.1
_SHORT_WORK_SECONDS: Final = 0.01
# Work before the first pause: a snapshot of a few changes is done by then, and a larger one does not disturb others for long.
_FIRST_WORK_SECONDS: Final = 0.03
# Shortest measurement.
_MEASURE_SECONDS: Final = 0.005
# Longest sleep without a call of ``on_pause``.
_SLICE_SECONDS: Final = 0.05
# A longer piece of work counts as this long: a pause must not last for minutes because one fsync took seconds.
_MAX_COUNTED_SECONDS: Final = 0.5


class Gauge(NamedTuple):
    """A counter of how long others have waited, or of what they have written."""

    read: Callable[[], float]
    """Function that returns seconds, or bytes, so far; raises OSError or ValueError when the counter is gone."""
    counts_us: bool
    """True if this process is counted, too: the counter then says something only while the process sleeps."""
    busy_at: float = _BUSY_WAITING
    """Increase per second from which on others count as busy."""


class PaceState(NamedTuple):
    """State of the throttle, for status documents."""

    share: float = 1.0
    """Share of the time that is spent working."""
    least_share: float = 0.0
    """Share below which it does not fall now."""
    waiting: float = 0.0
    """Share of the time in which others lately waited for the disk."""
    writing: float = 0.0
    """Bytes per second that others lately wrote."""
    paused_seconds: float = 0.0


class Pace:
    """Throttle of one process. Call `step` between any two pieces of work; threads that call it during a pause wait for its end.

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
            gauges: counters to measure; none: nothing is throttled.
            min_share: least share at the beginning, without a deadline.
            urgency: terms instead of ``min_share``; `urge` changes them.
            on_pause: called several times a second during a pause; ends it by raising.
            clock: monotonic clock.
            sleep: sleeps for so many seconds.
            we_wait: returns whether another thread of this process waits for a disk.
            processor_waits: seconds for which the calling thread has waited for a processor so far (`processor_waits`).
        """
        self._readers = [_GaugeReader(gauge) for gauge in gauges]
        self._on_pause = on_pause
        self._clock = clock
        self._sleep = sleep
        self._we_wait = we_wait or other_threads_wait
        self._share = 1.0
        self._waiting = self._writing = 0.0
        self._paused_seconds = 0.0
        self._processor_waits = processor_waits
        # One attribute, replaced as a whole: the thread that calls `urge` and the one that works see terms and time together.
        self._terms = (urgency or Urgency(min_share=min_share), clock())
        # Due early, as if some work had been done: see _FIRST_WORK_SECONDS.
        self._since = clock() - (_WORK_SECONDS - _FIRST_WORK_SECONDS)
        self._waited_for_processor = processor_waits()
        # Held during a pause: other threads of the process wait for its end in `step`.
        self._lock = threading.Lock()

    @property
    def state(self) -> PaceState:
        """Present state."""
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
        """Set new terms, from any thread. A running pause is adapted to them within a twentieth of a second."""
        self._terms = (urgency, self._clock())

    def step(self) -> None:
        """Pause if one is due. Costs a tenth of a microsecond if none is."""
        # Checked without the lock first, and again with it: another thread may have paused meanwhile.
        if self._worked() < 0:
            return
        with self._lock:
            worked = self._worked()
            if worked >= 0:
                waited = self._processor_waits()
                if self._readers and self.least_share < 1:
                    worked = max(0.0, worked - max(0.0, waited - self._waited_for_processor))
                    self._pause(min(worked, _MAX_COUNTED_SECONDS))
                    waited = self._processor_waits()
                self._waited_for_processor = waited
                self._since = self._clock()

    def _worked(self) -> float:
        """Return the seconds since the last pause; negative while none is due."""
        worked = self._clock() - self._since
        return worked if worked >= (_WORK_SECONDS if self._share >= 1 else _SHORT_WORK_SECONDS) else -1.0

    def _pause(self, worked: float) -> None:
        began, paused_before = self._clock(), self._paused_seconds
        owed = _MEASURE_SECONDS
        while owed > 0:
            self._measure(min(max(owed, _MEASURE_SECONDS), _SLICE_SECONDS))
            paused = self._clock() - began
            self._paused_seconds = paused_before + paused
            self._on_pause()
            # Also where nothing was measured: new terms (`urge`) may end the pause.
            self._share = max(self._share, self.least_share)
            owed = worked * (1 / self._share - 1) - paused

    def _measure(self, seconds: float) -> None:
        """Sleep, and adapt the share to what the gauges counted meanwhile."""
        # Asked before and after the sleep: pressure in which a thread of ours waited for a disk says nothing
        # of others.
        began, waited_before = self._clock(), self._we_wait()
        for reader in self._readers:
            reader.begin(began)
        self._sleep(seconds)
        now, we_waited = self._clock(), self._we_wait() or waited_before
        rates = [
            (reader.gauge.busy_at, rate)
            for reader in self._readers
            if not (we_waited and reader.gauge.counts_us) and (rate := reader.rate(now)) is not None
        ]
        if rates:
            self._adapt(max(rate / busy_at for busy_at, rate in rates))
            waiting = max(
                (min(1.0, rate) for busy_at, rate in rates if busy_at == _BUSY_WAITING), default=0.0
            )
            writing = max((rate for busy_at, rate in rates if busy_at == _BUSY_WRITING), default=0.0)
            # Smoothed, because only status documents have them: the throttle decides by the last measurement.
            self._waiting += (waiting - self._waiting) / 4
            self._writing += (writing - self._writing) / 4

    def _adapt(self, level: float) -> None:
        if level > 1:
            self._share = max(self.least_share, self._share / _FALL)
        elif level < _QUIET:
            self._share = min(1.0, self._share * _RISE)


class _GaugeReader:
    """A gauge, and its value at the last reading."""

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self._value: float | None = None
        self._at = 0.0

    def begin(self, now: float) -> None:
        # A gauge that counts this process is read anew before each sleep. Of the others, the increase during
        # the work is used as well.
        if self.gauge.counts_us or self._value is None:
            self._value, self._at = self._read(), now

    def rate(self, now: float) -> float | None:
        """Return the increase per second since the last reading; None if there is none."""
        before, value, seconds = self._value, self._read(), now - self._at
        self._value, self._at = value, now
        # The figure falls where a successor of the worker counts from 0 again.
        if before is None or value is None or value < before or seconds <= 0:
            return None
        return (value - before) / seconds

    def _read(self) -> float | None:
        try:
            return self.gauge.read()
        except (OSError, ValueError):
            return None


def yield_to_others(io_priority: str, share: float = MIN_SHARE) -> Precedence:
    """Lower the priority of the calling process and of threads that it starts later; return its precedence, to be changed.

    Must be called before privileges are dropped.

    Raises:
        ValueError: the I/O priority is not one of the configuration.
    """
    precedence = Precedence(io_priority)
    precedence.take(share)
    return precedence


def processor_waits() -> Callable[[], float]:
    """Return a function that returns for how many seconds the main thread has been ready to run and waited for a processor.

    Must be called before privileges are dropped. The function returns 0 where the kernel does not count that
    (CONFIG_SCHED_INFO).
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
        self.fd = os.open(path, os.O_RDONLY | flags)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def gauges(waits: Iterable[str]) -> list[Gauge]:
    """Return the gauges of this machine: the kernel's, where it has them, and the workers' at the paths ``waits``.

    Must be called before privileges are dropped. The descriptors stay open as long as the gauges.
    """
    found = []
    with suppress(OSError, ValueError):
        pressure = _Descriptor(_PRESSURE)
        # Read once: EOPNOTSUPP where pressure is disabled (psi=0 on the kernel's command line).
        _pressure_seconds(pressure.fd)
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
    """Return the names of the gauges that exist now: `pressure`, `writes`, `requests`."""
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
    """Return the paths of the wait counters of all workers whose control sockets are in the directory."""
    return glob.glob(os.path.join(glob.escape(runtime_dir), f"worker-*{WAITS_SUFFIX}"))


def other_threads_wait() -> bool:
    """Return whether a thread of this process other than the calling one waits for a disk now (state D)."""
    if threading.active_count() == 1:
        return False
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/stat", "rb") as file:
            # The name before the state may have blanks and parentheses itself (proc_pid_stat(5)).
            if file.read().rpartition(b")")[2].split()[0] == b"D":
                return True
    return False


def _pressure_seconds(fd: int) -> float:
    """Return the seconds for which at least one task has waited for I/O."""
    # The first line: `some avg10=… total=MICROSECONDS`.
    line = os.pread(fd, 256, 0).partition(b"\n")[0]
    return int(line.rpartition(b"total=")[2]) / 1e6


def _written_by_others(vmstat: int, own: int) -> float:
    """Return the bytes that others have dirtied in the page cache.

    `nr_dirtied` counts the pages of all processes, and `write_bytes` the bytes of this one. The kernel batches at most 125 pages of
    each processor, so the figure is current but for these. A file system dirties a few pages of its own in the writer's name.
    """
    # In one read from offset 0, for which the kernel computes the figures anew.
    pages = os.pread(vmstat, 1 << 16, 0).partition(b"\nnr_dirtied ")[2].partition(b"\n")[0]
    ours = os.pread(own, 4096, 0).partition(b"\nwrite_bytes: ")[2].partition(b"\n")[0]
    return float(int(pages) * _PAGE_BYTES - int(ours))


def _waits_seconds(fd: int) -> float:
    data = os.pread(fd, _WAITS.size, 0)
    if len(data) < _WAITS.size:
        raise ValueError("the file is empty")
    return float(_WAITS.unpack(data)[0]) / 1e6
