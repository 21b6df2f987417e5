"""Cost of a worker's death to the job: the longest single system call of each kill, and where its time went.

A call counts as *with a kill* when it was under way between the kill and a moment after the successor served;
every other long call shows what the machine does without any kill, and so how much is noise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

_SETTLED_SECONDS = 0.05
"""Time after a successor served during which it still has more to answer than usual."""


class LongCall(NamedTuple):
    """System call of a job."""

    name: str
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds


class Takeover(NamedTuple):
    """Times of a successor's log, on the wall clock; 0 where the log has none."""

    killed: float
    noticed: float
    resent: float
    served: float
    stages_ms: dict[str, float]
    """Stages of the successor, since the request to begin."""


class Stall(NamedTuple):
    """Longest call that a kill made some job wait in."""

    takeover: Takeover
    longest: LongCall
    first_answer: float


def takeovers(killed: Iterable[tuple[int, float]], log: Path) -> list[Takeover]:
    """Return the takeovers; ``killed`` has each worker's pid and the time of its SIGKILL."""
    died: dict[int, float] = {}
    resent: list[tuple[float, dict[str, float]]] = []
    mounted: list[float] = []
    for line in log.read_text(errors="replace").splitlines():
        if '"event": "' not in line or not line.startswith("{"):
            continue
        event = json.loads(line)
        if event["event"] == "worker_died":
            died[event["pid"]] = _seconds(event)
        elif event["event"] == "session_taken_over":
            resent.append((_seconds(event), event.get("stages_ms", {})))
        elif event["event"] == "root_mounted":
            mounted.append(_seconds(event))
    found = []
    for pid, at in killed:
        when, stages = next(((time, stages) for time, stages in resent if time > at), (0.0, {}))
        served = next((time for time in mounted if time > at), 0.0)
        found.append(Takeover(at, died.get(pid, 0.0), when, served, stages))
    return found


def _seconds(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


def stalls(found: Sequence[Takeover], calls: Sequence[LongCall]) -> tuple[list[Stall], list[LongCall]]:
    """Return a stall for each kill that made a call wait, and the long calls that no kill touched."""
    untouched = set(range(len(calls)))
    result: list[Stall] = []
    for takeover in found:
        until = max(takeover.served, takeover.resent, takeover.killed) + _SETTLED_SECONDS
        here = [
            index for index, call in enumerate(calls) if call.began < until and call.ended > takeover.killed
        ]
        untouched.difference_update(here)
        waited = [calls[index] for index in here]
        if waited:
            answers = [call.ended for call in waited if call.ended > takeover.resent]
            longest = max(waited, key=lambda call: call.seconds)
            result.append(Stall(takeover, longest, min(answers, default=0.0)))
    return result, [calls[index] for index in sorted(untouched)]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile; 0 for an empty sequence."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def lines(all_stalls: Sequence[Stall], untouched: Sequence[LongCall]) -> list[tuple[str, int]]:
    """Return the figures, each with what it counts."""
    waits = [1000 * stall.longest.seconds for stall in all_stalls]
    quiet = [1000 * call.seconds for call in untouched]
    made = [
        ("longest single call with a kill, ms: median of the kills", round(quantile(waits, 0.5))),
        ("  p99 of the kills", round(quantile(waits, 0.99))),
        ("  the longest of all", round(max(waits, default=0))),
        ("longest single call without any kill, ms", round(max(quiet, default=0))),
        ("  calls over 50 ms without any kill", sum(wait > 50 for wait in quiet)),
    ]
    whole = [stall for stall in all_stalls if stall.takeover.noticed and stall.takeover.resent]
    for name, parts in (
        ("noticed by the daemon", [stall.takeover.noticed - stall.takeover.killed for stall in whole]),
        ("requests asked for again", [stall.takeover.resent - stall.takeover.killed for stall in whole]),
        (
            "first answer",
            [stall.first_answer - stall.takeover.killed for stall in whole if stall.first_answer],
        ),
    ):
        made.append((f"ms from kill to: {name}, median", round(1000 * quantile(parts, 0.5))))
        made.append(("  p99", round(1000 * quantile(parts, 0.99))))
    stages = [stall.takeover.stages_ms for stall in whole]
    for name in dict.fromkeys(name for stage in stages for name in stage):
        values = [stage[name] for stage in stages if name in stage]
        made.append((f"successor: ms until {name}, median", round(median(values))))
        made.append(("  p99", round(quantile(values, 0.99))))
    return made
