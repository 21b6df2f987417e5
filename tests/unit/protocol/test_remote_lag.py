"""How far a remote is behind, from the record of what it has stored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ciuic.protocol.stored_remotely import RemoteLag, RemotePlace, StoredRecord, remote_lag, write_record

REPOSITORY = "ab" * 16
SECOND_NS = 10**9


class Info(NamedTuple):
    """Snapshot as `remote_lag` asks for it."""

    id: str
    time_ns: int
    new_bytes: int

    @property
    def order_ns(self) -> int:
        return self.time_ns


def infos(number: int) -> list[Info]:
    return [Info(f"cs-{n:06x}", n * SECOND_NS, 10**n) for n in range(1, number + 1)]


def lag_of(remote: str, snapshots: int, now_seconds: int, state_dir: Path) -> RemoteLag:
    """Return how far a remote is behind a repository with so many snapshots, one each second."""
    place = RemotePlace(remote, "memory://bucket")
    now_ns = now_seconds * SECOND_NS
    return remote_lag(place, REPOSITORY, infos(snapshots), now_ns=now_ns, state_dir=state_dir)


def test_what_waits_is_counted(tmp_path: Path) -> None:
    """Waiting are snapshots neither stored nor passed over; at risk is the time since the newest stored one."""
    record = StoredRecord(
        repository=REPOSITORY,
        stored=frozenset({"cs-000002", "cs-00000f"}),
        passed_over=frozenset({"cs-000003"}),
        tail_ns=15 * SECOND_NS,
    )
    write_record("remote", record, tmp_path)
    lag = lag_of("remote", 5, 10, tmp_path)
    assert (lag.snapshots, lag.size_bytes) == (3, 10 + 10**4 + 10**5)
    assert lag.seconds == 6
    assert (lag.stored, lag.newest, lag.newest_ns, lag.flaw) == (1, "cs-000002", 2 * SECOND_NS, "")


def test_older_snapshots_are_behind_and_not_at_risk(tmp_path: Path) -> None:
    """Once the newest snapshot is stored nothing that only this host has is new, whatever else waits."""
    write_record("remote", StoredRecord(repository=REPOSITORY, stored=frozenset({"cs-000005"})), tmp_path)
    lag = lag_of("remote", 5, 10, tmp_path)
    assert (lag.snapshots, lag.seconds) == (4, 0)


def test_without_a_record_everything_waits(tmp_path: Path) -> None:
    """No record, one of another repository, and one that cannot be read: all counts as waiting, with the reason."""
    assert "from this host" in lag_of("a", 2, 0, tmp_path).flaw
    write_record("b", StoredRecord(repository="cd" * 16, stored=frozenset({"cs-000001"})), tmp_path)
    lag = lag_of("b", 2, 9, tmp_path)
    assert (lag.snapshots, lag.stored, lag.seconds) == (2, 0, 8)
    assert "from this repository" in lag.flaw
    (tmp_path / "b" / "stored").write_bytes(b"{")
    lag = lag_of("b", 2, 0, tmp_path)
    assert (lag.snapshots, "cannot be read" in lag.flaw) == (2, True)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(0, 6),
    stored=st.frozensets(st.integers(1, 8)),
    passed_over=st.frozensets(st.integers(1, 8)),
)
def test_every_snapshot_is_in_one_of_three_states(
    number: int, stored: frozenset[int], passed_over: frozenset[int], tmp_path: Path
) -> None:
    """Each snapshot is stored, passed over or waiting; nothing waits exactly if no bytes and no time do."""
    name = f"r{time.monotonic_ns()}"
    record = StoredRecord(
        repository=REPOSITORY,
        stored=frozenset(f"cs-{n:06x}" for n in stored),
        passed_over=frozenset(f"cs-{n:06x}" for n in passed_over),
    )
    write_record(name, record, tmp_path)
    lag = lag_of(name, number, 100, tmp_path)
    here = set(range(1, number + 1))
    assert lag.stored == len(here & stored)
    assert lag.snapshots == len(here - stored - passed_over)
    assert (lag.size_bytes > 0) == (lag.snapshots > 0)
    newest = max(here & stored, default=0)
    at_risk = {n for n in here - stored - passed_over if n > newest}
    assert lag.seconds == (100 - min(at_risk) if at_risk else 0)
