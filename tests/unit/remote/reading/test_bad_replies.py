"""One bad reply of a proxy is not final: what does not verify is read again, for each kind of object, and named if it stays so."""

from __future__ import annotations

import itertools
import random
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.object_servers import Fault, FaultProxy, Request, SeaweedFS
from support.remote_host import BLOCK, RemoteHost, new_remote
from support.restoring import write

from ciuic.errors import CiuicError
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import add_slot, open_remote
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.objects import obstore_objects
from ciuic.remote.objects.model import NonsenseReply, NotAListing
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.sealing.key_slots import SlotSecret

SECRET = SlotSecret("key-file", bytes(range(32)))
# Not well-formed, as most pages.
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body><p>Sign in<br>to this network</body></html>"
KINDS = {
    "remote.json": r"GET [^?]*/remote\.json",
    "key": r"GET [^?]*/keys/",
    "log entry": r"GET [^?]*/w/",
    "manifest": r"GET [^?]*/manifests/",
    "meta pack": r"GET [^?]*/packs/meta/",
    "data pack": r"GET [^?]*/packs/data/",
    "listing": r"GET [^?]*\?.*list-type=2",
}
SPOILT: dict[str, Fault] = {
    "flipped bit": Fault(
        spoils=lambda body: (
            body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1 :]
        )
    ),
    "shorter body": Fault(spoils=lambda body: body[: len(body) // 2]),
    "cut body": Fault(cuts_reply_at=20),
    "web page": Fault(status=200, body=PAGE),
    "web page that says not found": Fault(status=404, body=PAGE),
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


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat requests without a pause; how often does not change."""
    for pauses in ("_NONSENSE_PAUSES_SECONDS", "_CUT_PAUSES_SECONDS"):
        monkeypatch.setattr(obstore_objects, pauses, (0.0,) * len(getattr(obstore_objects, pauses)))


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
    with read_remote(remote, cache_root=cache, retry_seconds=5, close_objects=True) as opened:
        assert opened.log_damage == []
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []
        return len(opened.snapshots.list())


@pytest.mark.parametrize(
    ("kind", "spoilt"),
    [
        # Each kind, and each way in a pack and in a listing; all other pairs in `make test-full`.
        pytest.param(
            *pair,
            id="-".join(pair),
            marks=() if {"data pack", "listing", "flipped bit"} & {*pair} else pytest.mark.full,
        )
        for pair in itertools.product(KINDS, SPOILT)
    ],
)
def test_spoilt_replies_are_read_again(
    kind: str, spoilt: str, stored: str, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """Two replies that are spoilt one after the other are no damage, whatever kind of object they are for."""
    plan = Spoiler(KINDS[kind], SPOILT[spoilt], 2)
    fault_proxy.fault = plan
    assert read_all(fault_proxy, stored, tmp_path) == 1
    assert plan.met == 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("key", "listing")])
def test_what_stays_spoilt_is_damage(kind: str, stored: str, fault_proxy: FaultProxy, tmp_path: Path) -> None:
    """A bit that is flipped in every reply is told as damage, and not passed on."""
    fault_proxy.fault = Spoiler(KINDS[kind], SPOILT["flipped bit"], 1 << 30)
    with pytest.raises((CiuicError, AssertionError)):
        read_all(fault_proxy, stored, tmp_path)


@pytest.mark.parametrize("well_formed", [False, True])
def test_a_page_in_place_of_the_listing_of_keys_is_no_listing(
    well_formed: bool, stored: str, fault_proxy: FaultProxy
) -> None:
    """A proxy that answers each listing with a page hides the key slots: the listing is named, and no key is called wrong."""
    page = PAGE.replace(b"<p>", b"").replace(b"<br>", b"") if well_formed else PAGE
    fault_proxy.fault = Spoiler(KINDS["listing"], Fault(status=200, body=page), 1 << 30)
    with pytest.raises(DamagedRemote if well_formed else NotAListing, match="listing"):
        open_remote(fault_proxy.connect(stored), [SlotSecret("key-file", bytes(32))])


def test_a_page_in_place_of_everything_is_no_store(stored: str, fault_proxy: FaultProxy) -> None:
    """A proxy that answers every request with a page is named, and nothing is called damaged."""
    fault_proxy.fault = lambda _request: Fault(status=200, body=PAGE)
    with pytest.raises(NonsenseReply, match="no reply of an object store"):
        open_remote(fault_proxy.connect(stored), [SECRET])
