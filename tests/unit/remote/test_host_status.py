"""Tests of the status of a host on a remote: who can write what, what is bounded, what a report costs, and its verdicts."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support import remote_recipe as recipe
from support.checkpoint_files import FORMATS
from support.remote_world import Bucket
from support.restoring import take

from ciuic.history import judge_snapshot
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.host_status import (
    MAX_STATUS_BYTES,
    HostStatus,
    StatusKey,
    StatusReporter,
    decode_status,
    expired_statuses,
    limited,
    own_key,
    read_statuses,
)
from ciuic.remote.object_names import status_name
from ciuic.remote.objects.model import ObjectInfo, RemoteRefused, RemoteUnreachable
from ciuic.remote.replication import _root_status
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.repository import Repository
from ciuic.repository.identity import Bytes
from ciuic.verdicts import records as verdict_records
from ciuic.verdicts.records import KEY_VARIABLE, VerdictRecords
from ciuic.verdicts.verdict import FileVerdicts

_SEALER = Sealer(recipe.REMOTE_ID, MasterKey(recipe.MASTER))
_KEY = recipe.STATUS_KEY
_OTHER = StatusKey(bytes(range(7, 39)))
_NAME = status_name(_KEY.reporter)
_HOUR_NS = 3600 * 10**9


def status(time_ns: int = recipe.TIME_NS, **fields: object) -> HostStatus:
    return msgspec.structs.replace(recipe.STATUS, time_ns=time_ns, **fields)


class Store(Bucket):
    """A bucket that may refuse to replace objects, or be away."""

    replaces = True
    is_away = False
    has_expired = False

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        if self.is_away:
            raise RemoteUnreachable("away")
        if self.has_expired:
            raise RemoteRefused("expired")
        if not self.replaces and name in self.objects:
            self.requests += 1
            raise RemoteRefused("this key may only add objects")
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        if self.has_expired:
            raise RemoteRefused("expired")
        return super().create(name, data)


def test_a_host_cannot_speak_for_another() -> None:
    """With the master key, which all hosts share, and any right to write: nothing verifies under the name of another host."""
    honest = _KEY.encode(_SEALER, _NAME, status())
    content = _SEALER.open(_NAME, honest)
    lies = {
        "signed by itself": _OTHER.encode(_SEALER, _NAME, status()),
        "with the key of the other": _SEALER.seal(
            _NAME, _KEY.public + _SEALER.open(_NAME, _OTHER.encode(_SEALER, _NAME, status()))[32:]
        ),
        "altered": _SEALER.seal(_NAME, content.replace(b"node-1", b"node-2")),
        "of another remote": _SEALER.seal(_NAME, _of_another_remote()),
        "cut": _SEALER.seal(_NAME, content[:90]),
        "in clear": _KEY.encode(Sealer(recipe.REMOTE_ID, None), _NAME, status()),
    }
    for lie in lies.values():
        with pytest.raises(DamagedRemote):
            decode_status(_SEALER, _NAME, lie)
    assert decode_status(_SEALER, _NAME, honest) == status()


def _of_another_remote() -> bytes:
    other = Sealer(bytes(16), MasterKey(recipe.MASTER))
    return other.open(_NAME, _KEY.encode(other, _NAME, status()))


def test_an_attacker_is_told_and_the_truth_is_found_beside_it() -> None:
    """A forgery under a later name hides nothing, one in place is told, and an old status that comes back is old."""
    bucket = Store(clock=lambda: recipe.TIME_NS)
    bucket.put(_NAME, [_KEY.encode(_SEALER, _NAME, status())])
    later = status_name(_KEY.reporter, 9_999_999_999)
    bucket.put(later, [_OTHER.encode(_SEALER, later, status(recipe.TIME_NS + 5, host="lie"))])
    (found,), _ = read_statuses(bucket, _SEALER)
    assert found.status == status()
    assert "another host wrote it" in found.flaw
    bucket.put(_NAME, [_OTHER.encode(_SEALER, _NAME, status())])
    (found,), _ = read_statuses(bucket, _SEALER)
    assert found.status is None
    assert found.flaw
    del bucket.objects[later]
    old = status(recipe.TIME_NS - 50 * _HOUR_NS)
    bucket.put(_NAME, [_KEY.encode(_SEALER, _NAME, old)])
    (found,), _ = read_statuses(bucket, _SEALER)
    assert (found.told_ns, found.flaw) == (old.time_ns, "")


def test_two_hosts_of_one_name_are_two() -> None:
    """The name of a host is a claim; the key is what it is."""
    bucket = Store()
    for key in (_KEY, _OTHER):
        bucket.put(status_name(key.reporter), [key.encode(_SEALER, status_name(key.reporter), status())])
    found, _ = read_statuses(bucket, _SEALER)
    assert {one.reporter for one in found} == {_KEY.reporter, _OTHER.reporter}


def test_a_status_is_bounded() -> None:
    """The largest that the types allow in characters of four bytes is refused by the writer, a usual one is small; the reader asks for no more."""
    text = limited("\N{ROCKET}" * 10_000 + "\udcff")
    assert len(text) == 500
    roots = (msgspec.structs.replace(recipe.STATUS.roots[0], path=text, reason=text),) * 32
    with pytest.raises(ValueError, match="are the limit"):
        _KEY.encode(_SEALER, _NAME, status(roots=roots))
    with pytest.raises(ValueError, match="could not be read back"):
        _KEY.encode(_SEALER, _NAME, status(roots=roots * 2))
    assert len(_KEY.encode(_SEALER, _NAME, status())) < 1500
    bucket = Store()
    bucket.put(_NAME, [bytes(MAX_STATUS_BYTES + 1)])
    (found,), _ = read_statuses(bucket, _SEALER)
    assert found.status is None


class Reports:
    """A reporter whose clock and host a test sets."""

    def __init__(self, bucket: Store) -> None:
        self.bucket = bucket
        self.seconds = 0.0
        self.now = status()
        self.reporter = StatusReporter(
            bucket,
            _SEALER,
            _KEY,
            lambda: msgspec.structs.replace(self.now, time_ns=recipe.TIME_NS + int(self.seconds * 1e9)),
            300,
            clock=lambda: self.seconds,
            now_ns=lambda: recipe.TIME_NS + int(self.seconds * 1e9),
        )

    def after(self, seconds: float) -> int:
        """Let time pass, report, and return the number of requests that this cost."""
        self.seconds += seconds
        before = self.bucket.requests
        self.reporter.report()
        return self.bucket.requests - before


def test_a_report_costs_one_request_and_none_while_nothing_changes() -> None:
    """What did not change is told again in time for the promise alone."""
    reports = Reports(Store())
    assert reports.after(0) == 1
    assert reports.after(100) == 0
    reports.now = status(error="503")
    assert reports.after(1) == 1
    assert reports.after(299) == 1
    (found,), _ = read_statuses(reports.bucket, _SEALER)
    assert found.status is not None
    assert found.status.error == "503"


def test_a_store_that_is_away_is_told_later() -> None:
    """A report that fails is left out; the next chance tells everything."""
    reports = Reports(Store())
    reports.bucket.is_away = True
    assert not reports.reporter.report()
    reports.bucket.is_away = False
    reports.bucket.has_expired = True
    assert not reports.reporter.report()
    reports.bucket.has_expired = False
    assert reports.reporter.report()
    assert list(reports.bucket.objects) == [_NAME]


def test_where_nothing_is_replaced_there_is_a_status_each_hour() -> None:
    """An append-only store gets a new name once an hour, and readers take the newest."""
    reports = Reports(Store())
    reports.bucket.replaces = False
    assert reports.after(0) == 1
    reports.now = status(error="later")
    reports.after(60)
    reports.now = status(error="latest")
    reports.after(60)
    assert len(reports.bucket.objects) == 2
    reports.after(3600)
    assert len(reports.bucket.objects) == 3
    (found,), _ = read_statuses(reports.bucket, _SEALER)
    assert found.status is not None
    assert (found.status.error, found.status.interval_seconds) == ("latest", 3600)


def test_a_collector_deletes_what_nobody_reads() -> None:
    """Hours before the last three names go, and hosts that fell silent a month before the others; nothing else does."""
    hours = [ObjectInfo(status_name(_KEY.reporter, hour), 1, 40 * 24 * _HOUR_NS) for hour in range(1, 5)]
    silent = ObjectInfo(status_name(_OTHER.reporter), 1, 9 * 24 * _HOUR_NS)
    odd = ObjectInfo("status/readme", 1, 0)
    assert expired_statuses([*hours, silent, odd]) == [hours[0].name, silent.name]
    assert expired_statuses([silent]) == []


def test_a_key_goes_with_the_log_of_the_host(tmp_path: Path) -> None:
    """It is kept over restarts and new logs of this host; the clone of a disk, which takes a new log, takes a new key."""
    path = str(tmp_path / "status-key")
    first = own_key(path, "a" * 32, {"a" * 32}).reporter
    assert (tmp_path / "status-key").stat().st_mode & 0o077 == 0
    assert own_key(path, "b" * 32, {"a" * 32, "b" * 32}).reporter == first
    assert own_key(path, "b" * 32, {"b" * 32}).reporter == first
    clone = own_key(path, "c" * 32, {"c" * 32}).reporter
    assert clone != first
    (tmp_path / "status-key").write_bytes(b"{}")
    assert own_key(path, "c" * 32, {"c" * 32}).reporter not in (first, clone)


WHOLE = FORMATS["safetensors"].make(random.Random(1))


def test_each_root_has_the_verdict_of_its_own_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host publishes each root of a snapshot with the verdict of that root's checkpoint."""
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key"))
    roots = [tmp_path / name for name in ("torn", "whole", "none")]
    for at, (root, content) in enumerate(zip(roots, (WHOLE[:-5], WHOLE, b""), strict=True)):
        root.mkdir()
        name = "step.safetensors" if content else "log"
        (root / name).write_bytes(content)
        seconds = time.time() - 100 + at
        os.utime(root / name, (seconds, seconds))
    with Repository.create(tmp_path / "repository") as repository:
        snapshot = take(repository, *roots)
        record = judge_snapshot(repository, [snapshot], snapshot, FileVerdicts())
        assert record is not None
        assert VerdictRecords(repository, verdict_records.own_key()).write(record)
        (info,) = repository.snapshots.list()
        verdicts = VerdictRecords(repository)
        found = [_root_status(repository, os.fsencode(root), info, verdicts).verdict for root in roots]
    # Not GOOD: of a directory without an overlay nobody knows whether it was written to meanwhile.
    assert found == ["TORN", "UNKNOWN", ""]
