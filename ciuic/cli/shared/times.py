"""Times as text, for people and scripts; local time is that of the machine's zone.

Guarantees: ``rfc3339`` carries an offset; ``clock`` is the format of ``list --machine-readable``.
"""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone
from typing import Final

from ciuic.errors import UsageError

NS: Final = 1_000_000_000
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}\Z")
_AGO: Final = re.compile(r"(?:\d+\s*[smhdw]\s*)+\Z")


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


def parse_when(text: str, now_ns: int, *, end_of_day: bool = False) -> int:
    """Parse ``2023-06-15``, ``2023-06-15 15:00[:00]``, an RFC 3339 time, or a duration ago (``2d``, ``90m``) to nanoseconds.

    A date alone is its first instant, or with ``end_of_day`` its last. Without an offset the time is local. UsageError
    for anything else.
    """
    text = text.strip()
    if _AGO.match(text):
        from ciuic.units import parse_duration

        return now_ns - parse_duration(text) * NS
    try:
        # Python 3.10 does not read the "Z" that RFC 3339 allows.
        when = datetime.fromisoformat(re.sub(r"[zZ]\Z", "+00:00", text))
    except ValueError as error:
        raise UsageError(
            f"not a time: {text!r}",
            hint='write for example "2023-06-15 15:00", 2023-06-15, 2023-06-15T15:00:00+02:00, or 2d (two days ago)',
        ) from error
    if end_of_day and _DATE.match(text):
        # A day later, and not 24 hours: the result is taken for local time below, on a day of 23 or 25 hours
        # as well.
        when += timedelta(days=1, microseconds=-1)
    # A time without an offset counts as local.
    aware = when.astimezone()
    # As in `local`: the fraction is added as an integer.
    return int(aware.timestamp()) * NS + aware.microsecond * 1000
