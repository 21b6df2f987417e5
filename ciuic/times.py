"""Times as people write them: one grammar for snapshot IDs and for options such as ``--since``.

Guarantees: a text names the same period in every command and on every version of Python; local time unless it has an
offset. Leaves the formats of output to the command line.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Final

import msgspec

from ciuic.errors import UsageError
from ciuic.units import parse_duration

# Compiled with the first use, of which `re` keeps the result: the repository imports this module for each command, and
# few of them are given a time.
_AGO: Final = r"(?a)(?:\d+\s*[smhdw]\s*)+\Z"
_WRITTEN: Final = (
    r"(?ai)(?:(?P<day>\d{4}-\d\d-\d\d|today|yesterday)(?:[T ](?=\d)|\Z))?"
    r"(?:(?P<clock>\d\d?:\d\d(?::\d\d(?:\.(?P<fraction>\d{1,9}))?)?) ?(?P<zone>Z|[+-]\d\d:?\d\d)?)?\Z"
)
_NS_PER_SECOND: Final = 10**9
EXAMPLES: Final = (
    'write for example 2h (two hours ago), 14:05 (today), "yesterday 14:05", 2023-06-15, "2023-06-15 15:00" or '
    "2023-06-15T15:00:00+02:00"
)


class Period(msgspec.Struct, frozen=True):
    """Instant, second or day that a text names, in nanoseconds since 1970."""

    first_ns: int
    after_ns: int
    """First instant after it."""


def parse_time(text: str, now_ns: int) -> Period:
    """Return the period that ``text`` names: a duration ago, a time of today, a date, or a date with a time.

    A duration ago is an instant, a date the whole day, a time its whole second, or the microsecond where it has a fraction.

    Raises:
        UsageError: ``text`` is no time.
    """
    text = text.strip()
    try:
        if re.match(_AGO, text):
            instant_ns = now_ns - parse_duration(text) * _NS_PER_SECOND
            return Period(instant_ns, instant_ns + 1)
        return _written(text, now_ns)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"not a time: {text!r}", hint=EXAMPLES) from error


def _written(text: str, now_ns: int) -> Period:
    found = re.match(_WRITTEN, text)
    if not text or found is None:
        raise ValueError(text)
    day, clock, fraction, zone = found.group("day", "clock", "fraction", "zone")
    start = _day(day, now_ns)
    if clock is None:
        # A day later, and not 24 hours: some days have 23 or 25.
        return Period(_ns(start), _ns(start + timedelta(days=1)))
    hour, minute, second = ([int(float(part)) for part in clock.split(":")] + [0])[:3]
    start = start.replace(hour=hour, minute=minute, second=second)
    if zone is not None:
        # Python 3.10 reads neither Z nor an offset without a colon.
        offset = "+00:00" if zone in "Zz" else f"{zone[:3]}:{zone[-2:]}"
        start = datetime.fromisoformat(start.isoformat() + offset)
    if fraction is None:
        return Period(_ns(start), _ns(start) + _NS_PER_SECOND)
    # Printed times are cut to the microsecond.
    first_ns = _ns(start) + int(fraction.ljust(9, "0")) // 1000 * 1000
    return Period(first_ns, first_ns + 1000)


def _day(day: str | None, now_ns: int) -> datetime:
    """Return the midnight that begins a day, without an offset."""
    if day is not None and day[0].isdigit():
        return datetime.fromisoformat(day)
    now = datetime.fromtimestamp(now_ns // _NS_PER_SECOND, tz=timezone.utc).astimezone()
    return now.replace(hour=0, minute=0, second=0, tzinfo=None) - timedelta(
        days=day is not None and day.lower() == "yesterday"
    )


def _ns(moment: datetime) -> int:
    # Without an offset it is local time.
    return int(moment.timestamp()) * _NS_PER_SECOND
