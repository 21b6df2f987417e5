"""Lag of a remote behind a repository, from the record of what it has stored.

The record is that of the process that uploads (`ciuic.protocol.stored_remotely`), so the figures need no network.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_record


class LaggingSnapshot(Protocol):
    """Facts about a snapshot; `ciuic.repository.SnapshotInfo` has it."""

    @property
    def id(self) -> str:
        """Id of the snapshot."""

    @property
    def time_ns(self) -> int:
        """Cut, ns since 1970."""

    @property
    def order_ns(self) -> int:
        """Place in the order of commits."""

    @property
    def new_bytes(self) -> int:
        """Bytes by which the snapshot let the packs grow."""


class RemoteLag(NamedTuple):
    """Snapshots of a repository that a remote lacks."""

    snapshots: int = 0
    """Snapshots that wait for the remote."""
    size_bytes: int = 0
    """Bytes by which these let the packs grow: about what is to be sent."""
    seconds: float = 0.0
    """Age of the oldest waiting snapshot that is newer than all stored ones: work that only this host has."""
    stored: int = 0
    """Snapshots of the repository that the remote has."""
    newest: str = ""
    """Newest of these; empty for none."""
    newest_ns: int = 0
    """Its cut."""
    flaw: str = ""
    """Why nothing is known of the remote, so that all counts as waiting; empty if all is well."""


def remote_lag(
    name: str,
    repository: str,
    snapshots: Iterable[LaggingSnapshot],
    *,
    now_ns: int,
    state_dir: Path | None = None,
) -> RemoteLag:
    """Return how far the remote ``name`` is behind.

    Args:
        name: Name of the remote.
        repository: Id of the repository.
        snapshots: All its snapshots.
        now_ns: The clock, UTC.
        state_dir: State directory of the process that uploads; None: the usual one.
    """
    stored: frozenset[str] = frozenset()
    passed_over: frozenset[str] = frozenset()
    flaw = ""
    try:
        record = read_record(name, state_dir)
    except StoredRecordDamaged as error:
        flaw = f"what the remote has stored cannot be read: {error}"
    else:
        if record is None:
            flaw = "nothing was ever uploaded from this host"
        elif record.repository != repository:
            flaw = "nothing was ever uploaded from this repository"
        else:
            stored, passed_over = record.stored, record.passed_over
    everything = list(snapshots)
    there = max((one for one in everything if one.id in stored), key=lambda one: one.order_ns, default=None)
    newest_ns = 0 if there is None else there.time_ns
    stored_to_ns = 0 if there is None else there.order_ns
    waiting = [one for one in everything if one.id not in stored and one.id not in passed_over]
    at_risk = min((one.time_ns for one in waiting if one.order_ns > stored_to_ns), default=None)
    return RemoteLag(
        snapshots=len(waiting),
        size_bytes=sum(one.new_bytes for one in waiting),
        seconds=0.0 if at_risk is None else max(0.0, (now_ns - at_risk) / 1e9),
        stored=sum(one.id in stored for one in everything),
        newest="" if there is None else str(there.id),
        newest_ns=newest_ns,
        flaw=flaw,
    )
