"""Resolve the snapshot that a person names: an id, a prefix of one, `latest`, `latest~N`, or a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import datetime, timedelta

from ciuic.errors import NotFound, UsageError
from ciuic.repository.model import SnapshotInfo
from ciuic.types import SnapshotId

_LATEST = re.compile(r"latest(?:~(\d{1,9}))?\Z")
_PREFIX = re.compile(r"(?:cs-)?([0-9a-f]{1,32})\Z")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}\Z")
_HINT = "ciuic list shows those there are."


def resolve(text: str, names: Collection[str], infos: Callable[[], list[SnapshotInfo]]) -> SnapshotId:
    """Return the id that ``text`` names.

    Args:
        text: An id, a prefix of one, ``latest``, ``latest~N``, or a time.
        names: Ids of all snapshots.
        infos: Returns the catalogue, newest first; called only where ids are not enough.

    Raises:
        NotFound: no snapshot fits.
        UsageError: ``text`` is none of these, or a prefix of several ids.
    """
    latest = _LATEST.match(text)
    if latest:
        return _nth(text, infos(), int(latest[1] or 0))
    # Before times: digits alone, such as 2023, are a prefix.
    prefix = _PREFIX.match(text)
    if prefix:
        return _by_prefix(text, f"cs-{prefix[1]}", names)
    until_ns = parse_time_ns(text)
    if until_ns is None:
        raise UsageError(
            f"{text!r} is not a snapshot id, latest, latest~N or a time",
            hint="A time is written 2023-06-15 15:00. " + _HINT,
        )
    # By the times that `list` shows: where the clock was set, they are not in the order of commits.
    found = max(
        (info for info in infos() if info.time_ns < until_ns), key=lambda info: info.time_ns, default=None
    )
    if found is not None:
        return found.id
    raise NotFound(f"there is no snapshot as old as {text}", hint=_HINT)


def parse_time_ns(text: str) -> int | None:
    """Return the first instant (ns) after the second or day that ``text`` names; None if it names no time."""
    # A text names a whole second or day: a snapshot within it counts.
    whole = timedelta(days=1) if _DATE.match(text) else timedelta(seconds=1)
    if "-" not in text[1:]:
        # A bare number is never a time; later versions of Python accept some.
        return None
    try:
        # Python 3.10 does not read the Z of RFC 3339.
        moment = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
        moment = moment.replace(microsecond=0) + whole
        # A time without an offset is local time.
        return int(moment.timestamp()) * 10**9
    except (ValueError, OverflowError, OSError):
        return None


def _nth(text: str, infos: list[SnapshotInfo], back: int) -> SnapshotId:
    if not infos:
        raise NotFound(
            f"there is no snapshot yet, so {text} names none",
            hint="`ciuic snapshot --wait` takes one now; `ciuic status` shows when the next is due",
        )
    if back >= len(infos):
        raise NotFound(f"there is no snapshot {text}: there are only {len(infos)}", hint=_HINT)
    return infos[back].id


def _by_prefix(text: str, prefix: str, names: Collection[str]) -> SnapshotId:
    # First, because a whole id may also be the beginning of longer ones: ids have 6 digits or more.
    if prefix in names:
        return SnapshotId.parse(prefix)
    found = sorted(name for name in names if name.startswith(prefix))
    if not found:
        raise NotFound(f"there is no snapshot {text}", hint=_HINT)
    if len(found) > 1:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise UsageError(f"{text} could be {shown}", hint="Give more digits.")
    return SnapshotId.parse(found[0])
