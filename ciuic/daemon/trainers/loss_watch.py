"""Losses of one training, and numbers that trainings write into files: no number any more, or a spike.

A value is a spike if it exceeds ``median + 10 * max(1.4826 * MAD, 0.7413 * IQR, 0.01 * |median|)``, with median, median absolute
deviation (MAD) and interquartile range (IQR) of the last 100 finite values before it, of which there must be 30. 1.4826 * MAD and 0.7413 * IQR are
the standard deviation of normal noise, which a few outliers do not move; the MAD alone is 0 where half of the values are alike.
The floor of one percent keeps a loss that hardly moves from spiking at noise. A loss that stays at a higher level is
no spike any more when half of the 100 values are of it.

References: P. J. Rousseeuw and C. Croux, "Alternatives to the Median Absolute Deviation", JASA 88 (1993).

Files (`[[watch_number]]`) are read by a process of its own (`NumberWatch`), and their numbers watched as reported losses are. Guarantees:
nothing waits for it; what the process prints is decoded as if a stranger had written it. A file that is absent or of another format is no
alert: it may come.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final, Literal, NamedTuple

import msgspec
import structlog
import trio

from ciuic.config import WatchNumber
from ciuic.daemon.base.events import Alerts, repeat
from ciuic.daemon.base.job_process import job_process
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.jobs import NumberJob, job_command
from ciuic.number_files import NumberPlace, NumbersRead
from ciuic.printable import one_line
from ciuic.protocol.control_types import Severity
from ciuic.structs import decode_json

_WINDOW: Final = 100
_MIN_VALUES: Final = 30
_TIMES: Final = 10.0
_DEVIATION_OF_MAD: Final = 1.4826
_DEVIATION_OF_IQR: Final = 0.7413
_LEAST_SHARE: Final = 0.01
_CALM_VALUES: Final = 10
"""Ordinary values in a row that end a trouble."""


class LossTrouble(NamedTuple):
    """A loss that is not finite or spikes, with the step at which that began."""

    kind: Literal["not finite", "spike"]
    step: int
    value: float
    usual: float
    """Median before it; not a number where there were too few values."""


def trouble_text(trouble: LossTrouble, snapshot: str) -> tuple[str, str, Severity]:
    """Return what an alert says behind the name of the number, its hint and its severity.

    Args:
        trouble: the trouble.
        snapshot: the newest snapshot before it; empty if it is not known.
    """
    usual = "" if math.isnan(trouble.usual) else f"; it was {trouble.usual:.4g}"
    is_spike = trouble.kind == "spike"
    found = f"spiked to {trouble.value:.4g}" if is_spike else "is no finite number"
    hint = (
        f"the newest snapshot before it: {snapshot}"
        if snapshot
        else "ciuic list shows the snapshots before it"
    )
    return (
        f"{found} at step {trouble.step}{usual}",
        f"{hint}; ciuic hold keeps it",
        "warning" if is_spike else "problem",
    )


class LossWatch:
    """Looks at one value after the other."""

    def __init__(self) -> None:
        self.trouble: LossTrouble | None = None
        """The trouble that stands; a loss that is no number outranks a spike."""
        self.reported: LossTrouble | None = None
        """The trouble of which an alert speaks."""
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._calm = 0

    def add(self, step: int, value: float) -> None:
        """Take the loss of a step."""
        kind: Literal["", "not finite", "spike"] = ""
        usual = median(self._values) if len(self._values) >= _MIN_VALUES else math.nan
        if not math.isfinite(value):
            kind = "not finite"
        elif not math.isnan(usual):
            ordered = sorted(self._values)
            range_ = ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]
            mad = median(abs(one - usual) for one in ordered)
            deviation = max(_DEVIATION_OF_MAD * mad, _DEVIATION_OF_IQR * range_)
            # Of a loss that is 0 throughout nothing is a spike by chance alone.
            if value > usual + _TIMES * max(deviation, _LEAST_SHARE * abs(usual)):
                kind = "spike"
        if math.isfinite(value):
            self._values.append(value)
        if not kind:
            self._calm += 1
            if self._calm >= _CALM_VALUES:
                self.trouble = None
            return
        self._calm = 0
        if self.trouble is None or (kind, self.trouble.kind) == ("not finite", "spike"):
            self.trouble = LossTrouble(kind, step, value, usual)


_KEY: Final = "number:"
_PERIOD_SECONDS: Final = 30.0
_LIMIT_SECONDS: Final = 120.0
_MAX_OUTPUT_BYTES: Final = 16 << 20
log = structlog.get_logger(__name__)


class _Watched:
    """A number, and how far its file was read."""

    def __init__(self, wanted: WatchNumber) -> None:
        self.place = NumberPlace(file=wanted.file, key=wanted.key)
        self.losses = LossWatch()
        self.problem = ""
        self.looked_ns: int | None = None
        """Time since boot before the last look; None: it did not see all of its file."""


class NumberWatch:
    """Reads the files every half minute; `run` is its task. Belongs to the trio thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        alerts: Alerts,
        *,
        cwd: Path,
        newest_snapshot: Callable[[int, str], str],
    ) -> None:
        """Prepare to look.

        Args:
            settings: settings in force.
            alerts: where troubles are reported.
            cwd: working directory of the process that reads.
            newest_snapshot: returns the newest snapshot with a file if it is from before a time since boot, else nothing.
        """
        self._settings = settings
        self._alerts = alerts
        self._cwd = cwd
        self._newest_snapshot = newest_snapshot
        self._watched: dict[WatchNumber, _Watched] = {}

    async def run(self) -> None:
        """Look until cancelled. Changes of the configuration take effect."""
        await repeat(self.once, _PERIOD_SECONDS, "numbers_not_read")

    async def once(self) -> None:
        """Read what has come, and report troubles."""
        wanted = self._settings().watch_numbers
        for gone in self._watched.keys() - set(wanted):
            del self._watched[gone]
            self._alerts.clear(_key(gone))
        if not wanted:
            return
        watched = [self._watched.setdefault(one, _Watched(one)) for one in wanted]
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        lines = await self._read(NumberJob(places=tuple(one.place for one in watched)))
        for number, one, line in zip(wanted, watched, lines, strict=False):
            try:
                found = decode_json(line, NumbersRead)
                values = [(step, float(text)) for step, text in found.numbers]
            except (msgspec.DecodeError, ValueError) as error:
                log.warning("numbers_not_read", file=number.file, error=str(error))
                continue
            if found.problem != one.problem:
                one.problem = found.problem
                log.info("numbers_of_file", file=number.file, problem=found.problem)
            is_read_on = (found.path, found.inode) == (one.place.path, one.place.inode)
            # A file that is read from its beginning may have had its numbers for long.
            before_ns = one.looked_ns if is_read_on and found.offset >= one.place.offset else None
            if found.path:
                one.looked_ns = None if found.has_more or found.problem else now_ns
                one.place = msgspec.structs.replace(
                    one.place, path=found.path, inode=found.inode, offset=found.offset
                )
            for step, value in values:
                one.losses.add(step, value)
            self._tell(number, one, before_ns)

    def _tell(self, number: WatchNumber, watched: _Watched, before_ns: int | None) -> None:
        losses = watched.losses
        trouble = losses.trouble
        if trouble is None:
            self._alerts.clear(_key(number))
        elif losses.reported != trouble:
            snapshot = "" if before_ns is None else self._newest_snapshot(before_ns, watched.place.path)
            text, hint, severity = trouble_text(trouble, snapshot)
            self._alerts.report(
                _key(number),
                f"{one_line(number.key)} of {one_line(number.file)} {text}",
                hint=hint,
                severity=severity,
            )
        losses.reported = trouble

    async def _read(self, job: NumberJob) -> list[bytes]:
        output = bytearray()
        # A file on a disk that hangs must not end the watch of the others for ever, and may hold the process in the kernel.
        with trio.move_on_after(_LIMIT_SECONDS):
            async with job_process(
                job_command("numbers"), job, self._cwd, at_once=True, wait_seconds=1
            ) as running:
                async for part in running.stdout:
                    output += part
                    if len(output) > _MAX_OUTPUT_BYTES:
                        break
        return bytes(output).split(b"\n")[:-1]


def _key(number: WatchNumber) -> str:
    return f"{_KEY}{one_line(number.file)}:{one_line(number.key)}"
