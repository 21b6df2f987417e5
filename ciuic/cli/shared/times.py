"""Times as text, for people and scripts; local time is that of the machine's zone.

Guarantees: ``rfc3339`` carries an offset; ``clock`` is the format of ``list --machine-readable``.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Final

NS: Final = 1_000_000_000


def local(time_ns: int) -> datetime:
    """Return the instant in local time, to the microsecond."""
    # Whole seconds and microseconds apart: nanoseconds since 1970 do not fit into the 53 bits of a float.
    return (
        datetime.fromtimestamp(time_ns // NS, tz=timezone.utc) + timedelta(microseconds=time_ns % NS // 1000)
    ).astimezone()


def rfc3339(time_ns: int) -> str:
    """Return the instant as ``2023-06-15T15:00:00.250000+02:00``."""
    return local(time_ns).isoformat(timespec="microseconds")


def clock(time_ns: int) -> str:
    """Return the instant as ``2023-06-15 15:00:00``, local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns // NS))


def clock_of(text: str) -> str:
    """Return the local ``YYYY-MM-DD HH:MM:SS`` of an RFC 3339 text; the text itself if it is not one."""
    try:
        return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text


def parse_when(text: str, now_ns: int, *, end_of_period: bool = False) -> int:
    """Return the nanoseconds of a time as `ciuic.times` reads it; with ``end_of_period`` the last instant that it names."""
    from ciuic.times import parse_time

    period = parse_time(text, now_ns)
    return period.after_ns - 1 if end_of_period else period.first_ns
