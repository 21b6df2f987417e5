"""Trials of `ciuic remote upload`: killed at random moments, behind a network that fails, and the host lost at the end.

Each returns what it counted and every promise that was broken; small doses run in the suite
(tests/e2e/test_upload_trials.py), long ones in `make torture ARGS=remote`.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from support import trees
from support.live import wait_for
from support.network import Network
from support.object_servers import Fault, FaultProxy, Request
from support.restoring import write
from support.uploading_host import UploadingHost

from ciuic.remote.objects.model import Objects


class Server(Protocol):
    """Object store that a trial uses."""

    endpoint: str

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the environment in which programs find it, perhaps through a proxy."""

    def new_url(self) -> str:
        """Return a new prefix."""

    def connect(self, url: str, endpoint: str = "") -> Objects:
        """Return a client."""


class Trial(NamedTuple):
    """Outcome of a trial."""

    counted: int
    flaws: tuple[str, ...]


def killed_and_lost(
    server: Server, place: Path, rng: random.Random, *, sealed: bool, snapshots: int, everything: bool = True
) -> Trial:
    """Kill the uploader at random moments, then lose the host; count kills.

    Args:
        server: Object store.
        place: Empty directory.
        rng: Source of every choice.
        sealed: Whether the remote is encrypted.
        snapshots: Snapshots that are taken while the uploader is killed again and again.
        everything: Let the root have every kind of file; needs root.
    """
    url = server.new_url()
    objects = server.connect(url)
    host = UploadingHost(place / "host", url, objects, server.environment(), sealed=sealed)
    kills = 0
    try:
        if everything:
            trees.make_everything(host.root)
        for _ in range(snapshots):
            host.change(rng, rng.randint(1 << 20, 8 << 20))
            host.snapshot_root()
            for _ in range(rng.randint(1, 2)):
                process = host.start_upload()
                # From the first system call of the process to some time after the last commit.
                time.sleep(rng.uniform(0.2, 2.5))
                assert process.poll() is None, (host.top / "upload.log").read_text()
                host.kill_upload()
                kills += 1
        host.start_upload()
        host.wait_stored()
        host.change(rng, 8 << 20)
        last = host.snapshot_root()
        time.sleep(rng.uniform(0, 0.6))
    finally:
        host.lose()
    flaws = host.flaws(objects, place / "elsewhere", server.environment(), maybe=last)
    return Trial(kills + 1, tuple(flaws))


def behind_faults(
    server: Server,
    place: Path,
    rng: random.Random,
    *,
    snapshots: int,
    unavailable_seconds: float,
    sealed: bool = True,
) -> Trial:
    """Upload through a proxy that loses and spoils; count faults.

    Replies of PUT and create are lost, bodies of requests and replies are cut, requests are delayed, and for
    ``unavailable_seconds`` in the middle every request is answered with 503.
    """
    url = server.new_url()
    objects = server.connect(url)
    with FaultProxy(server.endpoint) as proxy:
        host = UploadingHost(place / "host", url, objects, server.environment(proxy.endpoint), sealed=sealed)
        faults = RandomFaults(rng)
        proxy.fault = faults
        try:
            host.start_upload()
            for number in range(snapshots):
                host.change(rng, rng.randint(1 << 20, 6 << 20))
                host.snapshot_root()
                if number == snapshots // 2:
                    faults.away_until = time.monotonic() + unavailable_seconds
            host.wait_stored()
        finally:
            host.lose()
    assert faults.kinds >= {"reply of a create lost", "503", "reply lost", "request cut"}, faults.kinds
    flaws = host.flaws(objects, place / "elsewhere", server.environment())
    return Trial(faults.count, tuple(flaws))


class RandomFaults:
    """Plan of faults: one request of four fails or waits, and all do while the store is away."""

    def __init__(self, rng: random.Random) -> None:
        self.count = 0
        self.kinds: set[str] = set()
        self.away_until = 0.0
        self._rng = rng

    def __call__(self, request: Request) -> Fault | None:
        creates = "if-none-match" in request.headers
        if time.monotonic() < self.away_until:
            return self._noted("503", Fault(status=503))
        # Every commit is tried at least once with a lost reply, which chance would do to a few alone.
        if creates and "reply of a create lost" not in self.kinds:
            return self._noted("reply of a create lost", Fault(drops_reply=True))
        if self._rng.random() >= 0.25:
            return None
        length = int(request.headers.get("content-length") or 0)
        kinds = [
            ("reply of a create lost" if creates else "reply lost", Fault(drops_reply=True)),
            ("request lost", Fault(drops_request=True)),
            ("reply cut", Fault(cuts_reply_at=self._rng.randrange(64))),
            ("late", Fault(delay=lambda: time.sleep(0.2))),
        ]
        if length:
            kinds.append(("request cut", Fault(cuts_request_at=self._rng.randrange(length))))
        # Short trials have few requests: what did not happen yet goes first.
        unseen = [kind for kind in kinds if kind[0] not in self.kinds]
        return self._noted(*self._rng.choice(unseen or kinds))

    def _noted(self, kind: str, fault: Fault) -> Fault:
        self.count += 1
        self.kinds.add(kind)
        return fault


class SentTwice(NamedTuple):
    """Outcome of an upload that was killed again and again."""

    kills: int
    size_bytes: int
    """Size of the snapshot, which is random bytes."""
    sent_bytes: int
    """Bytes of all bodies that left the host, those that were cut off included."""
    cut_bodies: int
    """Bodies that a kill cut. The kernel sends what a socket's buffer holds also after the kill: a small body arrives whole."""
    seconds: float
    flaws: tuple[str, ...]

    @property
    def excess(self) -> float:
        """Bytes that were sent beyond the size of the snapshot, as a share of it."""
        return self.sent_bytes / self.size_bytes - 1


def killed_on_the_way(
    server: Server, place: Path, rng: random.Random, *, size_bytes: int, kills: int, bytes_per_second: float
) -> SentTwice:
    """Upload one snapshot over a slow network, with a number of kills spread over it; count what was sent.

    Args:
        server: Object store.
        place: Empty directory.
        rng: Source of every choice.
        size_bytes: Size of the snapshot.
        kills: Kills; each comes when the next part of the snapshot has been sent, wherever the process is.
        bytes_per_second: Rate of the network, for all connections together.
    """
    url = server.new_url()
    objects = server.connect(url)
    with FaultProxy(server.endpoint) as proxy:
        host = UploadingHost(place / "host", url, objects, server.environment(proxy.endpoint))
        proxy.pace = Network(bytes_per_second)
        for number in range(8):
            write(host.root / f"part-{number}", rng.randbytes(size_bytes // 8))
        host.snapshot_root()
        before, began = proxy.body_bytes, time.monotonic()
        try:
            # Where in the snapshot each kill comes: at random, and never all at the end.
            marks = sorted(rng.uniform(0, 0.97) for _ in range(kills))
            for mark in marks:
                host.start_upload()
                until = before + int(mark * size_bytes)
                wait_for("the next part", lambda until=until: proxy.body_bytes >= until, 600)  # type: ignore[misc]
                host.kill_upload()
            host.start_upload()
            host.wait_stored()
            seconds = time.monotonic() - began
            sent = proxy.body_bytes - before
        finally:
            host.lose()
    flaws = host.flaws(objects, place / "elsewhere", server.environment())
    return SentTwice(kills, size_bytes, sent, proxy.cut_bodies, seconds, tuple(flaws))
