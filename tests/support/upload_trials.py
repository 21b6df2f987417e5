"""Trials of `ciuic remote upload`: killed at random moments, behind a network that fails, and the host lost at the end.

Each returns what it counted and every promise that was broken; small doses run in the suite
(tests/smoke/test_upload_trials.py), long ones in `make torture ARGS=remote`.

The host uploads with the installed command, and is brought back from its remote alone.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from support import trees
from support.cli_repository import Host
from support.live import installed
from support.network import Network
from support.object_servers import Fault, FaultProxy, Request
from support.remote_host import Elsewhere
from support.restoring import take, write
from support.until import until

from ciuic.protocol.stored_remotely import read_record
from ciuic.remote.access import add_slot, init_remote, open_remote
from ciuic.remote.documents import LogCommit, decode_log_entry
from ciuic.remote.object_names import LOGS_PREFIX, parse_log_entry
from ciuic.remote.objects.model import Objects
from ciuic.remote.sealing.key_slots import RECOVERY_KEY_BYTES, SlotSecret, recovery_secret, show_recovery_key
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.repository import Repository
from ciuic.repository.repository import DEFAULT_BLOCK_SIZE

_STORED_SECONDS = 600


class UploadingHost(Host):
    """Host with a root, a repository, and `ciuic remote upload` as a process that a test starts and kills.

    Args:
        top: Directory of the host; missing.
        url: Place of the remote, which is made.
        objects: The same place, not through a proxy.
        environment: Where the server is for the host's commands, and its credentials.
        sealed: Whether the remote is encrypted.
        shared: Host that has made the remote, which this one joins; None: it is made.
    """

    def __init__(
        self,
        top: Path,
        url: str,
        objects: Objects,
        environment: Mapping[str, str],
        *,
        sealed: bool = True,
        shared: UploadingHost | None = None,
    ) -> None:
        super().__init__(top)
        self.url = url
        self.env.update(environment)
        self.root = top / "root"
        self.root.mkdir()
        self.taken: dict[str, trees.Manifest] = {}
        """Files that each snapshot has to bring back."""
        if shared is None:
            # Not by `remote init`, whose proof of create-only takes SeaweedFS ten seconds.
            remote = init_remote(
                objects, master=MasterKey.generate() if sealed else None, block_size=DEFAULT_BLOCK_SIZE
            )
            self._recovery_key = show_recovery_key(os.urandom(RECOVERY_KEY_BYTES)) if sealed else None
            for secret in self.remote_secrets():
                add_slot(remote, "recovery", secret)
        else:
            self._recovery_key = shared._recovery_key
        if self._recovery_key is not None:
            self.env["CIUIC_REMOTE_RECOVERY_KEY"] = self._recovery_key
        self.run("remote", "join", url, *([] if sealed else ["--no-encryption"]))
        self.env.pop("CIUIC_REMOTE_RECOVERY_KEY", None)
        self._upload: subprocess.Popen[bytes] | None = None

    def secrets(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return what a machine elsewhere needs: where the server is, and the recovery key."""
        key = {} if self._recovery_key is None else {"CIUIC_REMOTE_RECOVERY_KEY": self._recovery_key}
        return {**environment, **key}

    def remote_secrets(self) -> list[SlotSecret]:
        """Return what opens the remote; nothing where it is not encrypted."""
        return [] if self._recovery_key is None else [recovery_secret(self._recovery_key)]

    def change(self, rng: random.Random, size_bytes: int) -> None:
        """Write files with so many new bytes, and change and remove some of the earlier ones."""
        old = sorted(path for path in self.root.glob("new-*") if path.is_file())
        for path in rng.sample(old, len(old) // 3):
            path.unlink()
        for path in rng.sample(old, len(old) // 3):
            if path.exists():
                with open(path, "r+b") as file:
                    file.seek(rng.randrange(path.stat().st_size))
                    file.write(rng.randbytes(100))
        count = rng.randint(2, 6)
        for _ in range(count):
            write(self.root / f"new-{rng.getrandbits(40):010x}", rng.randbytes(size_bytes // count))

    def snapshot_root(self) -> str:
        """Take a snapshot of the root, and remember what it has to bring back."""
        with Repository.open(self.repository) as repository:
            id_ = str(take(repository, self.root).id)
        self.taken[id_] = trees.manifest(self.root)
        return id_

    # -- the process

    def start_upload(self) -> subprocess.Popen[bytes]:
        """Start the process that uploads."""
        with open(self.top / "upload.log", "ab") as log:
            self._upload = subprocess.Popen(
                [str(installed()), "remote", "upload"],
                env=self.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self._upload

    def kill_upload(self) -> None:
        """Send SIGKILL to the process, if there is one."""
        if self._upload is not None:
            self._upload.kill()
            self._upload.wait()
            self._upload = None

    def stored(self) -> set[str]:
        """Return the snapshots that the process says are stored."""
        record = read_record("remote", self.state)
        return set() if record is None else set(record.stored)

    def wait_stored(self, seconds: float = _STORED_SECONDS) -> None:
        """Wait until the running process has stored every snapshot."""

        def all_stored() -> bool:
            assert self._upload is not None
            assert self._upload.poll() is None, (self.top / "upload.log").read_text()
            return self.taken.keys() <= self.stored()

        until("the upload", all_stored, seconds)

    def lose(self) -> None:
        """Kill what runs, and remove everything that the host has."""
        self.kill_upload()
        self.close()
        shutil.rmtree(self.top)

    # -- the remote

    def commits(self, objects: Objects) -> Counter[str]:
        """Return how many commits the logs of the remote have of each snapshot."""
        remote = open_remote(objects, self.remote_secrets())
        found: Counter[str] = Counter()
        for info in remote.objects.list(LOGS_PREFIX):
            position = parse_log_entry(info.name)
            assert position is not None, info.name
            data = bytes(remote.objects.get(info.name))
            entry = decode_log_entry(remote.sealer, position.writer, position.number, data)
            if isinstance(entry, LogCommit):
                found[entry.snapshot] += 1
        return found

    def flaws(
        self, objects: Objects, place: Path, environment: Mapping[str, str], *, maybe: str = ""
    ) -> list[str]:
        """Read the remote on another machine; return what is lost, changed, or committed twice.

        Args:
            objects: The remote, not through a proxy.
            place: Directory of the other machine; made here.
            environment: Where the server is, and its credentials.
            maybe: Snapshot whose upload was under way when the host was lost: it may be there, whole.
        """
        place.mkdir()
        elsewhere = Elsewhere(place, self.url, self.secrets(environment))
        listed = elsewhere.listed()
        wanted = self.taken.keys() - {maybe}
        flaws = [f"{id_} is lost" for id_ in wanted - listed]
        flaws += [f"{id_} was never taken" for id_ in listed - self.taken.keys()]
        for id_, count in self.commits(objects).items():
            if count != 1:
                flaws.append(f"{id_} was committed {count} times")
        verified = elsewhere.start("verify", "--all", "--checksum")
        if verified.returncode != 0:
            flaws.append((verified.stdout + verified.stderr).decode())
        for id_ in listed & self.taken.keys():
            flaws += [f"{id_}: {line}" for line in elsewhere.differences(id_, self.root, self.taken[id_])]
        shutil.rmtree(place)
        return flaws


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
        length = int(request.headers.get("content-length") or 0)
        # There are few large bodies.
        if length and not creates and "request cut" not in self.kinds:
            return self._noted("request cut", Fault(cuts_request_at=self._rng.randrange(length)))
        if self._rng.random() >= 0.25:
            return None
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
                wanted = before + int(mark * size_bytes)
                until("the next part", lambda wanted=wanted: proxy.body_bytes >= wanted, 600)  # type: ignore[misc]
                host.kill_upload()
            host.start_upload()
            host.wait_stored()
            seconds = time.monotonic() - began
            sent = proxy.body_bytes - before
        finally:
            host.lose()
    flaws = host.flaws(objects, place / "elsewhere", server.environment())
    return SentTwice(kills, size_bytes, sent, proxy.cut_bodies, seconds, tuple(flaws))
