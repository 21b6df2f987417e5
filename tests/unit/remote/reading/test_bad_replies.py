"""One bad reply of a proxy is not final: what does not verify is read again, for each kind of object, and named if it stays so."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.object_servers import Fault, FaultProxy, Request, SeaweedFS
from support.remote_host import BLOCK, RemoteHost, new_remote
from support.restoring import write

from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access.remote import add_slot, open_remote
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.sealing.slot_secret import SlotSecret

SECRET = SlotSecret("key-file", bytes(range(32)))
KINDS = {
    "remote.json": r"GET [^?]*/remote\.json",
    "key": r"GET [^?]*/keys/",
    "log entry": r"GET [^?]*/w/",
    "manifest": r"GET [^?]*/manifests/",
    "meta pack": r"GET [^?]*/packs/meta/",
    "data pack": r"GET [^?]*/packs/data/",
}
SPOILT: dict[str, Fault] = {
    "flipped bit": Fault(
        spoils=lambda body: (
            body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1 :]
        )
    ),
    "shorter body": Fault(spoils=lambda body: body[: len(body) // 2]),
    "cut body": Fault(cuts_reply_at=20),
}


@dataclass
class Spoiler:
    """Plan that spoils the first replies to requests of a kind."""

    pattern: str
    spoilt: Fault
    left: int
    met: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Request) -> Fault | None:
        with self.lock:
            if self.left <= 0 or not re.match(self.pattern, f"{request.method} {request.path}"):
                return None
            self.left -= 1
            self.met += 1
            return self.spoilt


@pytest.fixture(scope="module")
def stored(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Provide the URL of a remote with a snapshot of one file."""
    url = seaweedfs.new_url()
    remote = new_remote(seaweedfs.connect(url))
    add_slot(remote, "key-file", SECRET)
    host = RemoteHost(tmp_path_factory.mktemp("host") / "host", remote)
    write(host.root / "file", random.Random(1).randbytes(8 * BLOCK))
    host.snapshot()
    host.upload()
    return url


def read_all(proxy: FaultProxy, url: str, cache: Path) -> int:
    """Read every snapshot and its content from the bucket; return how many there are."""
    remote = open_remote(proxy.connect(url), [SECRET])
    with read_remote(remote, cache_root=cache, patience_seconds=5, close_objects=True) as opened:
        assert opened.log_damage == []
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []
        return len(opened.snapshots.list())


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("kind", KINDS)
def test_spoilt_replies_are_read_again(
    kind: str, spoilt: str, stored: str, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """Two replies that are spoilt one after the other are no damage, whatever kind of object they are for."""
    plan = Spoiler(KINDS[kind], SPOILT[spoilt], 2)
    fault_proxy.fault = plan
    assert read_all(fault_proxy, stored, tmp_path) == 1
    assert plan.met == 2
