"""Resolve the snapshot that a person names: an id, a prefix of one, `latest`, `latest~N`, or a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection

from ciuic.errors import NotFound, UsageError
from ciuic.repository.model import SnapshotInfo
from ciuic.times import parse_time
from ciuic.types import SnapshotId

_LATEST = re.compile(r"latest(?:~(\d{1,9}))?\Z")
_PREFIX = re.compile(r"(?:cs-)?([0-9a-f]{1,32})\Z")
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
    # Before times: digits alone, such as 2023, and the d of 2d are a prefix where there is such an id.
    prefix = _PREFIX.match(text)
    if prefix:
        found_by_prefix = _by_prefix(text, f"cs-{prefix[1]}", names)
        if found_by_prefix is not None:
            return found_by_prefix
    try:
        until_ns = parse_time(text, time.time_ns()).after_ns
    except UsageError as error:
        if prefix:
            raise NotFound(f"there is no snapshot {text}", hint=_HINT) from None
        raise UsageError(
            f"{text!r} is not a snapshot id, latest, latest~N or a time",
            hint=f"A time: {error.hint}. {_HINT}",
        ) from None
    # By the times that `list` shows: where the clock was set, they are not in the order of commits.
    found = max(
        (info for info in infos() if info.time_ns < until_ns), key=lambda info: info.time_ns, default=None
    )
    if found is not None:
        return found.id
    raise NotFound(f"there is no snapshot as old as {text}", hint=_HINT)


def _nth(text: str, infos: list[SnapshotInfo], back: int) -> SnapshotId:
    if not infos:
        raise NotFound(
            f"there is no snapshot yet, so {text} names none",
            hint="`ciuic snapshot --wait` takes one now; `ciuic status` shows when the next is due",
        )
    if back >= len(infos):
        raise NotFound(f"there is no snapshot {text}: there are only {len(infos)}", hint=_HINT)
    return infos[back].id


def _by_prefix(text: str, prefix: str, names: Collection[str]) -> SnapshotId | None:
    # First, because a whole id may also be the beginning of longer ones: ids have 6 digits or more.
    if prefix in names:
        return SnapshotId.parse(prefix)
    found = sorted(name for name in names if name.startswith(prefix))
    if len(found) > 1:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise UsageError(f"{text} could be {shown}", hint="Give more digits.")
    return SnapshotId.parse(found[0]) if found else None
