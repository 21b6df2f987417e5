"""Reading over a connection that fails: requests are repeated for a limited time, and the restore is exact or says that nobody answers."""

from __future__ import annotations

import os
import random
import threading
from itertools import count
from pathlib import Path

import pytest
from support import trees
from support.object_servers import Fault, FaultProxy, Request, SeaweedFS
from support.remote_host import BLOCK, RemoteHost, new_remote
from support.restoring import write

from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.objects.model import RemoteUnreachable, UntrustedStore
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.reading.retry_policy import RetryPolicy
from ciuic.repository import log
from ciuic.restore import execute, plan_restore


def test_a_restore_outlives_faults(seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path) -> None:
    """With answers of 503, replies that are lost and bodies that are cut, every byte of a restore is right."""
    url = seaweedfs.new_url()
    remote = new_remote(seaweedfs.connect(url))
    host = RemoteHost(tmp_path / "host", remote)
    rng = random.Random(1)
    for number in range(30):
        write(host.root / f"{number}", rng.randbytes(rng.randrange(20 * BLOCK)))
    manifest = trees.manifest(host.root)
    snapshot = host.snapshot()
    host.upload()
    lock = threading.Lock()
    left = [40]

    def fault(request: Request) -> Fault | None:
        with lock:
            if left[0] <= 0 or rng.random() < 0.6:
                return None
            left[0] -= 1
            return rng.choice(
                (
                    Fault(status=503),
                    Fault(drops_reply=True),
                    Fault(drops_request=True),
                    Fault(cuts_reply_at=100),
                )
            )

    fault_proxy.fault = fault
    behind = remote._replace(objects=fault_proxy.connect(url))
    with read_remote(behind, cache_root=tmp_path / "cache", close_objects=True) as opened:
        there = tmp_path / "there"
        there.mkdir()
        repository = opened.repositories[0]
        result = execute(
            plan_restore(repository, snapshot, [os.fsencode(host.root)], dest=os.fsencode(there))
        )
        assert result.complete, result.error()
        assert verify_snapshots(repository, checksum=True).damages == []
    trees.assert_same(manifest, trees.manifest(there / "root"))
    assert left[0] < 30


def test_a_store_that_is_away_is_no_damage(tmp_path: Path) -> None:
    """A store that stops answering ends a restore or a verification with that reason, and no file is wrong or half there."""
    from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket

    away = threading.Event()

    class Leaving(MemoryObjects):
        def get_ranges(self, name, ranges):  # type: ignore[no-untyped-def]
            if away.is_set():
                raise RemoteUnreachable("no answer")
            return super().get_ranges(name, ranges)

    bucket = f"leaving-{os.urandom(6).hex()}"
    remote = new_remote(Leaving(bucket))
    host = RemoteHost(tmp_path / "host", remote)
    for number in range(8):
        write(host.root / f"{number}", random.Random(number).randbytes(20 * BLOCK))
    snapshot = host.snapshot()
    host.upload()
    with read_remote(remote, cache_root=tmp_path / "cache", retry_seconds=0) as opened:
        repository = opened.repositories[0]
        assert verify_snapshots(repository).damages == []
        away.set()
        there = tmp_path / "there"
        there.mkdir()
        plan = plan_restore(repository, snapshot, [os.fsencode(host.root)], dest=os.fsencode(there))
        with pytest.raises(RemoteUnreachable):
            execute(plan)
        with pytest.raises(RemoteUnreachable):
            verify_snapshots(repository, [snapshot.id], checksum=True)
    assert [path for path in there.rglob("[0-9]") if path.is_file()] == []
    forget_bucket(bucket)


def test_a_request_that_is_repeated_says_so_once_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten seconds the reason is told, once for all requests that have it; after the time of the policy the error is raised."""
    told: list[tuple[str, object]] = []
    monkeypatch.setattr(log, "sink", lambda event, fields: told.append((event, fields["error"])))
    ticks = count(0, 6)
    policy = RetryPolicy(20, clock=lambda: float(next(ticks)))
    monkeypatch.setattr(policy._ended, "wait", lambda seconds: False)
    names = iter(f"cannot read {number}: no answer" for number in range(100))

    def request() -> None:
        raise RemoteUnreachable(next(names))

    for _ in range(2):
        with pytest.raises(RemoteUnreachable):
            policy.call(request)
    assert told == [("remote_request_repeated", "cannot read 1: no answer")]


def test_a_certificate_that_is_none_is_told_at_once() -> None:
    """A store whose certificate is not trusted is asked once: who waits at a terminal can mend it."""
    asked = count()

    def request() -> None:
        next(asked)
        raise UntrustedStore("cannot read x: its TLS certificate has expired")

    with pytest.raises(UntrustedStore):
        RetryPolicy(60).call(request)
    assert next(asked) == 1
