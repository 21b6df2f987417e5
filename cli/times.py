"""Instants as people and scripts read and write them; all local time comes from the machine's zone.

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
    """The instant in local time, to the microsecond."""
    return (
        datetime.fromtimestamp(time_ns // NS, tz=timezone.utc) + timedelta(microseconds=time_ns % NS // 1000)
    ).astimezone()


def rfc3339(time_ns: int) -> str:
    """``2023-06-15T15:00:00.250000+02:00``."""
    return local(time_ns).isoformat(timespec="microseconds")


def clock(time_ns: int) -> str:
    """``2023-06-15 15:00:00``, local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns // NS))


def clock_of(text: str) -> str:
    """The local ``YYYY-MM-DD HH:MM:SS`` of an RFC 3339 text; the text itself if it is not one."""
    try:
        return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text


def parse_when(text: str, now_ns: int, *, end_of_day: bool = False) -> int:
    """Nanoseconds of ``2023-06-15``, ``2023-06-15 15:00[:00]``, an RFC 3339 time, or a duration ago (``2d``, ``90m``).

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
        when += timedelta(days=1, microseconds=-1)
    aware = when.astimezone()
    return int(aware.timestamp()) * NS + aware.microsecond * 1000
