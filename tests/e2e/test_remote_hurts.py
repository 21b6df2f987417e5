"""Remotes whose hosts, clocks, disks and servers misbehave: nothing is lost, and the fault is named."""

from __future__ import annotations

import http.server
import ipaddress
import itertools
import json
import os
import random
import re
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from support.cli_repository import FIRST_NS, CliRepository, Host
from support.object_servers import (
    ACCESS_KEY,
    S3_DOMAIN,
    SECRET_KEY,
    Authority,
    Fault,
    FaultProxy,
    Request,
    SeaweedFS,
    TokenProxy,
    Triple,
    _ProxyHandler,
    connect_s3,
)
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.log_reader import LogReader
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import ObjectInfo, RemoteUnreachable
from ciuic.remote.objects.s3_botocore import S3Client
from ciuic.remote.objects.urls import StoreSettings, parse_url
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.upkeep.check import repair_remote
from ciuic.remote.upkeep.collect import collect_remote, give_up_snapshots, open_collector, resolve_snapshots
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.uploader import FIRST_PACK_BYTES, Labels, Stopped
from ciuic.remote.writer_log import LogUpkeep
from ciuic.repository import Repository
from ciuic.types import Snapshot

# S3 tells times in seconds: also what was stored within this one is old.
AT_ONCE = CollectionPolicy(young_ns=-(10**10), repack_share=0.6)
YEAR_SECONDS = 365 * 86_400
PACK_SALT = slice(16, 32)


def collect(remote: Remote, cache: Path, *forget: str) -> None:
    """Give up these snapshots and free what no other needs, as an operator on a machine of its own."""
    with reading(remote, cache) as opened:
        if forget:
            give_up_snapshots(opened, resolve_snapshots(opened, list(forget)), host="operator")
    with reading(remote, cache) as opened:
        collect_remote(opened, host="operator", policy=AT_ONCE)


def new_snapshot(host: RemoteHost, blocks: int = 9) -> str:
    """Return the id of a snapshot of a file with new content."""
    write(host.root / "file", os.urandom(blocks * BLOCK))
    return str(host.snapshot().id)


def problem_of_upload(host: RemoteHost) -> str:
    """Return the first problem of an upload, which is stopped by it."""
    told: list[str] = []
    stop = threading.Event()

    def problem(text: str) -> None:
        told.append(text)
        stop.set()

    with pytest.raises(Stopped):
        host.upload(problem=problem, stop=stop)
    return told[0]


def assert_whole(remote: Remote, cache: Path, *ids: str) -> None:
    """Fail unless just these snapshots are there, and every byte of them is as it was."""
    with reading(remote, cache) as opened:
        assert sorted(opened.snapshots.ids()) == sorted(ids)
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []


@pytest.mark.parametrize("when", ["between two processes", "between the chunks and the commit"])
def test_a_host_never_relies_on_what_another_deleted(seaweedfs: SeaweedFS, tmp_path: Path, when: str) -> None:
    """A host whose cached index has packs that another host has deleted stores their chunks again before it commits."""
    remote = new_remote(seaweedfs.connect(seaweedfs.new_url()))
    host = RemoteHost(tmp_path / "host", remote)
    content = random.Random(when).randbytes(40 * BLOCK)
    write(host.root / "file", content)
    first = str(host.snapshot().id)
    write(host.root / "file", b"another")
    second = str(host.snapshot().id)
    host.upload()
    packs = {info.name for info in remote.objects.list("packs/")}
    write(host.root / "again", content)
    third = str(host.snapshot().id)
    if when == "between two processes":
        collect(remote, tmp_path / "operator", first)
        host.upload()
    else:

        def labels(_: Repository, snapshot: Snapshot) -> Labels:
            if packs <= {info.name for info in remote.objects.list("packs/")}:
                collect(remote, tmp_path / "operator", first)
            return Labels()

        host.upload(labels)
    assert not packs <= {info.name for info in remote.objects.list("packs/")}
    assert_whole(remote, tmp_path / "reader", second, third)


def sealed_bytes(remote: Remote) -> dict[str, bytes]:
    """Return every object whose key or position is used once."""
    return {
        info.name: remote.objects.get(info.name)
        for info in remote.objects.list("")
        if not info.name.startswith(("keys/", "proof/", "remote.json"))
    }


def test_a_host_restored_to_last_week_uses_nothing_twice(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    """After the whole local state went back, no object is replaced, no key is used twice, and both times verify."""
    remote = new_remote(seaweedfs.connect(seaweedfs.new_url()))
    host = RemoteHost(tmp_path / "host", remote)
    rng = random.Random(7)
    ids: list[str] = []

    def snapshot(one: RemoteHost) -> None:
        write(host.root / f"{rng.randrange(4)}", rng.randbytes(9 * BLOCK))
        ids.append(str(one.snapshot().id))
        one.upload()

    for _ in range(2):
        snapshot(host)
    restored = host.copy(tmp_path / "restored", remote)
    for _ in range(3):
        snapshot(host)
    before = sealed_bytes(remote)
    for _ in range(3):
        snapshot(restored)
    after = sealed_bytes(remote)
    assert {name: after.get(name) for name in before} == before
    salts = Counter(data[PACK_SALT] for data in after.values())
    assert set(salts.values()) == {1}
    assert_whole(remote, tmp_path / "reader", *ids)


class WrongClock:
    """Directory of Python code that moves the clock of a process, for PYTHONPATH."""

    def __init__(self, place: Path, seconds: int) -> None:
        place.mkdir()
        (place / "sitecustomize.py").write_text(
            f"import time\n_s, _n = time.time, time.time_ns\n"
            f"time.time = lambda: _s() + {seconds}\ntime.time_ns = lambda: _n() + {seconds} * 10**9\n"
        )
        self.path = str(place)


@pytest.mark.parametrize("seconds", [YEAR_SECONDS, -YEAR_SECONDS])
def test_a_wrong_clock_deletes_and_hides_nothing(short_tmp: Path, seconds: int) -> None:
    """A host whose clock is a year wrong uploads, spares what is young by the store's clock, and shows everything."""
    nas = short_tmp / "nas"
    right, wrong = Host(short_tmp / "right"), Host(short_tmp / "wrong")
    right.run("remote", "init", f"file://{nas}")
    wrong.env["PYTHONPATH"] = WrongClock(short_tmp / "clock", seconds).path
    wrong.run("remote", "join", f"file://{nas}", "--open-with", str(right.key_file))
    for host in (right, wrong):
        host.snapshot_of(os.urandom(300_000), os.urandom(300_000))
        host.run("remote", "upload", "--once")

    def shown(host: Host) -> set[str]:
        return {one["id"] for one in host.json("list", "--all-hosts")["snapshots"]}

    everything = shown(right)
    assert len(everything) == 4
    assert shown(wrong) == everything
    given_up = everything.pop()
    right.run("forget", "--remote", "-y", given_up)
    assert wrong.json("prune", "--remote")["freed_bytes"] == 0
    then = time.time() - 2 * 86_400
    for path in nas.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))
    # The index keeps the times that it has seen, and a store never changes them.
    wrong.env["XDG_CACHE_HOME"] = str(wrong.top / "another-cache")
    assert wrong.json("prune", "--remote")["freed_bytes"] > 250_000
    for host in (right, wrong):
        made = CliRepository(host.repository, host.top / "root", make=False)
        made.snapshot({b"file": os.urandom(100_000)}, id_="cs-00000a")
        host.run("remote", "upload", "--once")
    assert shown(right) == shown(wrong)
    assert len(shown(right)) == 5
    assert not wrong.json("verify", "--remote", "--checksum")["damaged"]


class LateListings:
    """Each new name is missing in the first listings of a proxy that should have it."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._late: dict[str, int] = {}
        self._listings = 0
        self.missed = 0
        proxy.fault = self._fault

    def refuse(self, listings: int) -> None:
        """Have every name that is stored from now on be missing in so many listings."""
        self._listings = listings

    def _fault(self, request: Request) -> Fault | None:
        if request.method == "PUT" and self._listings:
            self._late.setdefault(request.path.partition("?")[0].removeprefix("/tests/"), self._listings)
        elif request.method == "GET" and "list-type=2" in request.path:
            return Fault(spoils=self._without_newest)
        return None

    def _without_newest(self, body: bytes) -> bytes:
        def keep(found: re.Match[bytes]) -> bytes:
            name = found[1].decode()
            if not self._late.get(name):
                return found[0]
            self._late[name] -= 1
            self.missed += 1
            return b""

        return re.sub(rb"<Contents>.*?<Key>([^<]*)</Key>.*?</Contents>", keep, body, flags=re.DOTALL)


def test_late_listings_are_refused_or_do_no_harm(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """Where listings lack the newest names, commits stand, a collection refuses or ends, and nothing is lost."""
    late = LateListings(fault_proxy)
    remote = new_remote(fault_proxy.connect(seaweedfs.new_url()))
    host, other = (RemoteHost(tmp_path / name, remote, name=name) for name in ("host", "other"))
    rng = random.Random(3)
    ids: list[str] = []
    for listings in (0, 2, 1, 3):
        late.refuse(listings)
        for one in (host, other):
            write(one.root / f"{rng.randrange(3)}", rng.randbytes(9 * BLOCK))
            ids.append(str(one.snapshot().id))
            one.upload()
        with suppress(RemoteUnreachable, Damaged, NotFound):
            collect(remote, tmp_path / "operator", ids[0])
    assert late.missed > 20
    late.refuse(0)
    for one in (host, other):
        one.upload()
    # The last names are still missing in a few.
    for _ in range(4):
        with suppress(RemoteUnreachable, Damaged, NotFound):
            collect(remote, tmp_path / "operator")
    collect(remote, tmp_path / "operator")
    assert_whole(remote, tmp_path / "reader", *ids[1:])


class CountedNames(MemoryObjects):
    """Objects that count the names that were listed."""

    listed = 0

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix, after=after):
            self.listed += 1
            yield info


def test_what_lies_beside_the_prefix_costs_nothing(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """No listing asks for more than names below the prefix, with 200,000 foreign objects beside it."""
    name = f"beside-{os.urandom(6).hex()}"
    foreign = MemoryObjects(name)
    beside = (f"train{('', 'ing-', 'ingg/', 'ing0/')[number % 4]}{number}" for number in range(200_000))
    # In order each goes to the end of the names, and moves no others.
    for other in sorted(beside):
        foreign.put(other, [b""])
    objects = CountedNames(name, "training")
    remote = new_remote(objects)
    host = RemoteHost(tmp_path / "host", remote)
    id_ = new_snapshot(host)
    host.upload()
    collect(remote, tmp_path / "operator")
    assert_whole(remote, tmp_path / "reader", id_)
    assert objects.listed < 200
    forget_bucket(name)
    # What a server is asked for: its own index finds the prefix.
    url = seaweedfs.new_url()
    for end in ("", "-old", "x/"):
        seaweedfs.connect("s3://tests").put(f"{url.rpartition('/')[2]}{end}x", [b""])
    remote = new_remote(fault_proxy.connect(url))
    host = RemoteHost(tmp_path / "s3", remote)
    new_snapshot(host)
    host.upload()
    collect(remote, tmp_path / "operator-s3")
    asked = [
        request.path
        for request in fault_proxy.requests
        if request.method == "GET" and "list-type" in request.path
    ]
    assert asked
    assert all(f"prefix={url.rpartition('/')[2]}%2F" in path for path in asked)


class BodyLimit:
    """Limit of the size of bodies in a proxy, as nginx has it.

    Args:
        proxy: The proxy.
        limit_bytes: Largest body that it takes.
        below: Part of the names that have the limit.
    """

    def __init__(self, proxy: FaultProxy, limit_bytes: int, below: str = "/") -> None:
        self._limit_bytes = limit_bytes
        self._below = below
        self.refused_bytes: list[int] = []
        """Size of each body that was refused."""
        proxy.fault = self._fault

    def _fault(self, request: Request) -> Fault | None:
        size_bytes = int(request.headers.get("content-length", 0))
        if request.method != "PUT" or size_bytes <= self._limit_bytes or self._below not in request.path:
            return None
        self.refused_bytes.append(size_bytes)
        return Fault(
            status=413,
            body=b"<html><head><title>413 Request Entity Too Large</title></head></html>",
        )


@pytest.mark.parametrize("limit_bytes", [5 << 20, 1 << 20, 64 << 10])
def test_a_limit_of_bodies_makes_packs_smaller_or_is_told(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path, limit_bytes: int
) -> None:
    """Behind a proxy that takes no large bodies smaller packs are sent, of the first snapshot and of later ones; below the smallest, size and setting are told."""
    remote = new_remote(fault_proxy.connect(seaweedfs.new_url()))
    limit = BodyLimit(fault_proxy, limit_bytes)
    host = RemoteHost(tmp_path / "host", remote)
    # A pack has at most a sixteenth of what was sent.
    for number in range(20):
        write(host.root / f"{number}", os.urandom(limit_bytes))
    ids = [str(host.snapshot().id)]
    if limit_bytes > FIRST_PACK_BYTES:
        host.upload()
        assert len(limit.refused_bytes) <= 8
        write(host.root / "3", os.urandom(limit_bytes))
        ids.append(str(host.snapshot().id))
        host.upload()
        assert_whole(remote, tmp_path / "reader", *ids)
        return
    told = problem_of_upload(host)
    assert "no body of" in told
    assert "client_max_body_size 32m" in told


@pytest.mark.parametrize("limit_bytes", [5 << 20, 1 << 20])
def test_collections_and_repairs_make_smaller_packs_behind_a_limit(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path, limit_bytes: int
) -> None:
    """What a collection copies, and what a repair stores again, goes into packs that the proxy takes."""
    remote = new_remote(fault_proxy.connect(seaweedfs.new_url()))
    host = RemoteHost(tmp_path / "host", remote)
    kept = range(0, 64, 3)
    for number in range(64):
        write(host.root / f"{number}", os.urandom(1 << 20))
    first = str(host.snapshot().id)
    host.upload()
    for number in set(range(64)) - set(kept):
        (host.root / f"{number}").unlink()
    ids = [str(host.snapshot().id)]
    host.upload()
    before = {info.name for info in remote.objects.list("packs/")}
    limit = BodyLimit(fault_proxy, limit_bytes)
    collect(remote, tmp_path / "operator", first)
    assert limit.refused_bytes
    assert_whole(remote, tmp_path / "reader", *ids)
    copied = [info for info in remote.objects.list("packs/") if info.name not in before]
    assert sum(info.size_bytes for info in copied) > limit_bytes
    remote.objects.delete([info.name for info in copied if "/data/" in info.name])
    limit.refused_bytes.clear()

    @contextmanager
    def reopen() -> Iterator[ReadableRemote]:
        with reading(remote, tmp_path / "repair") as opened:
            yield opened

    assert not repair_remote(reopen, host.repository, host="operator").damaged
    assert limit.refused_bytes
    assert_whole(remote, tmp_path / "reader", *ids)


def test_rounds_and_logs_larger_than_a_limit(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """A collection of many packs is done in several rounds, a log is not summed up, and a manifest that does not fit is named."""
    remote = new_remote(fault_proxy.connect(seaweedfs.new_url()))
    host = RemoteHost(tmp_path / "host", remote)
    ids = []
    for _ in range(24):
        ids.append(new_snapshot(host, 3))
        host.upload()
    limit = BodyLimit(fault_proxy, 1200, "/gc/")
    collect(remote, tmp_path / "operator", *ids[:-2])
    assert limit.refused_bytes
    assert_whole(remote, tmp_path / "reader", *ids[-2:])
    assert len(list(remote.objects.list("packs/data/"))) == 2
    limit = BodyLimit(fault_proxy, 500, "/w/")
    with (
        reading(remote, tmp_path / "operator") as opened,
        open_collector(opened.readers[0], host="operator", policy=AT_ONCE) as collector,
    ):
        collector._upkeep = LogUpkeep(
            remote.objects, remote.sealer, LogReader(remote.objects, remote.sealer), max_entries=0
        )
        collector.run()
    assert limit.refused_bytes
    assert_whole(remote, tmp_path / "reader", *ids[-2:])
    BodyLimit(fault_proxy, 100, "/manifests/")
    new_snapshot(host, 3)
    told = problem_of_upload(host)
    assert "cannot store manifests/" in told
    assert "no body of" in told


def test_hosts_of_one_cloned_disk_have_a_retention_each(short_tmp: Path) -> None:
    """No snapshot of one is removed by the rules of the other, however they take turns; status and check name two writers."""
    url = f"file://{short_tmp}/nas"
    one = Host(short_tmp / "one")
    one.run("remote", "init", url)
    with one.config.open("a") as file:
        file.write('[remote.keep]\nkeep_last = 2\nkeep_within = "1m"\n')
    made = itertools.count(1)

    def snapshot(host: Host) -> str:
        number = next(made)
        repository = CliRepository(host.repository, short_tmp / "root", make=False)
        id_ = f"cs-{number:06x}"
        made_ns = FIRST_NS + number * 3600 * 10**9
        return str(repository.snapshot({b"file": os.urandom(50_000)}, id_=id_, time_ns=made_ns))

    common = [snapshot(one) for _ in range(2)]
    one.run("remote", "upload", "--once")
    two = Host(short_tmp / "two")
    for name in ("repository", "upload"):
        shutil.copytree(one.top / name, two.top / name)
    shutil.copy2(one.key_file, two.key_file)
    two.config.write_text(one.config.read_text().replace(str(one.top), str(two.top)))

    def there() -> set[str]:
        return {found["id"].rpartition("/")[2] for found in one.json("list", "--all-hosts")["snapshots"]}

    # The host that goes on in the common log keeps the common snapshots; the other one's snapshots are its own.
    own = {host.top: [snapshot(host)] for host in (one, two)}
    for host in (two, one):
        host.run("remote", "upload", "--once")
    for _ in range(3):
        own[one.top].append(snapshot(one))
        one.run("remote", "upload", "--once")
        assert {*common[1:], *own[two.top], *own[one.top][-2:]} <= there()
    for _ in range(3):
        own[two.top].append(snapshot(two))
        two.run("remote", "upload", "--once")
        assert {*own[two.top][-2:], *own[one.top][-2:]} <= there()
    one.run("remote", "upload", "--once")
    assert there() == {*own[one.top][-2:], *own[two.top][-2:]}
    for host in (one, two):
        assert "2 logs for this repository" in " ".join(host.run("remote", "status").stdout.decode().split())
    report = one.json("check", "--remote")
    assert not report["damaged"]
    assert ["2 writers" in finding["message"] for finding in report["findings"]] == [True]
    assert not one.json("verify", "--remote", "--checksum")["damaged"]


def test_a_store_with_an_ipv6_address_alone(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """An endpoint such as http://[::1]:9000 is uploaded to and read from."""

    class OverIPv6(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6

    class Handler(_ProxyHandler):
        owner = fault_proxy

    with OverIPv6(("::1", 0), Handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        remote = new_remote(seaweedfs.connect(seaweedfs.new_url(), f"http://[::1]:{server.server_port}"))
        host = RemoteHost(tmp_path / "host", remote)
        id_ = new_snapshot(host)
        host.upload()
        assert_whole(remote, tmp_path / "reader", id_)
        server.shutdown()
        serving.join(10)


LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@pytest.mark.parametrize(
    ("name", "until", "named"),
    [
        (LOOPBACK, -timedelta(days=1), "has expired: renew it"),
        (x509.DNSName("other.example"), timedelta(days=1), "is for another host name: check the endpoint"),
    ],
)
def test_an_upload_waits_for_a_certificate(
    seaweedfs: SeaweedFS,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: x509.GeneralName,
    until: timedelta,
    named: str,
) -> None:
    """A certificate that is none for this store is told with its remedy, and the upload ends by itself once it is renewed."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with FaultProxy(seaweedfs.endpoint, authority.certify(name, until=until)) as proxy:
        url = seaweedfs.new_url()
        made = new_remote(seaweedfs.connect(url))
        host = RemoteHost(tmp_path / "host", made._replace(objects=proxy.connect(url)))
        id_ = new_snapshot(host)
        told: list[str] = []

        def problem(text: str) -> None:
            if not told:
                proxy.show_certificate(authority.certify(LOOPBACK))
            told.append(text)

        host.upload(problem=problem)
        assert named in told[0]
        assert told[-1] == ""
        assert_whole(made._replace(objects=proxy.connect(url)), tmp_path / "reader", id_)


def test_a_private_authority_is_trusted_by_every_client(
    seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSL_CERT_FILE counts for both clients of S3; without it the message names it."""
    authority = Authority(tmp_path)
    with FaultProxy(seaweedfs.endpoint, authority.certify(LOOPBACK)) as proxy:
        url = seaweedfs.new_url()

        def versions_client() -> S3Client:
            settings = StoreSettings(endpoint=proxy.endpoint, region="us-east-1")
            return S3Client(parse_url(url), settings, seaweedfs.environment(proxy.endpoint))

        def listing() -> None:
            client = versions_client()
            with client.request("list", "a") as requests:
                requests.list_objects_v2(Bucket=client.bucket)

        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        for ask in (lambda: proxy.connect(url).put("a", [b"1"]), listing):
            with pytest.raises(RemoteUnreachable, match="SSL_CERT_FILE"):
                ask()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        proxy.connect(url).put("a", [b"1"])
        listing()
        proxy.show_certificate(authority.certify(LOOPBACK, until=-timedelta(days=1)))
        with pytest.raises(RemoteUnreachable, match="has expired"):
            listing()
        proxy.show_certificate(authority.certify(x509.DNSName("other.example")))
        with pytest.raises(RemoteUnreachable, match="another host name"):
            listing()


def test_keys_that_rotate_while_an_upload_runs(
    seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload whose key is refused says so, takes the key that replaces it in the shared file, and ends well."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"

    def rotate(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={SECRET_KEY}\n")

    environment = {"HOME": str(tmp_path), "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    url = seaweedfs.new_url()
    made = new_remote(seaweedfs.connect(url))
    rotate("ended")
    told: list[str] = []

    def problem(text: str) -> None:
        told.append(text)
        rotate(ACCESS_KEY)

    objects = connect_s3(url, seaweedfs.endpoint, environment=environment)
    host = RemoteHost(tmp_path / "host", made._replace(objects=objects))
    id_ = new_snapshot(host)
    host.upload(problem=problem)
    assert "the store answered 403" in told[0]
    assert told[-1] == ""
    assert_whole(made, tmp_path / "reader", id_)


def test_a_bucket_in_the_host_name(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that wants bucket.host is reached as the profile says, by both clients of S3."""
    config = tmp_path / "config"
    config.write_text("[default]\nregion = us-east-1\ns3 =\n    addressing_style = virtual\n")
    monkeypatch.setenv("HTTP_PROXY", fault_proxy.endpoint)
    monkeypatch.setenv("http_proxy", fault_proxy.endpoint)
    endpoint = f"http://{S3_DOMAIN}"
    environment = {**seaweedfs.environment(endpoint), "AWS_CONFIG_FILE": str(config)}
    url = seaweedfs.new_url()
    remote = new_remote(connect_s3(url, endpoint, environment=environment))
    host = RemoteHost(tmp_path / "host", remote)
    first = new_snapshot(host)
    id_ = new_snapshot(host)
    host.upload()
    collect(remote, tmp_path / "operator", first)
    assert_whole(remote, tmp_path / "reader", id_)
    client = S3Client(parse_url(url), StoreSettings(endpoint=endpoint), environment)
    with client.request("list", "a") as requests:
        assert requests.list_objects_v2(Bucket=client.bucket)["KeyCount"]
    assert {request.headers["host"] for request in fault_proxy.requests} == {f"tests.{S3_DOMAIN}"}
    assert not any(request.path.startswith("/tests") for request in fault_proxy.requests)


class Rotation:
    """Credentials that are replaced every one and a half seconds by others; each set is taken until the next but one comes."""

    def __init__(self, proxy: TokenProxy, put: Callable[[Triple], None]) -> None:
        self._proxy = proxy
        self._put = put
        self._end = threading.Event()
        self.count = 0
        self._rotate()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _rotate(self) -> None:
        self.count += 1
        made = Triple(*(f"{part}-{self.count:04d}-{os.urandom(20).hex()}" for part in Triple._fields))
        self._proxy.known[made.key] = made
        self._proxy.valid = {*list(self._proxy.known)[-2:]}
        self._put(made)

    def _run(self) -> None:
        while not self._end.wait(1.5):
            self._rotate()

    def __enter__(self) -> Rotation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_session_tokens_that_rotate_while_uploads_run(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    """No request mixes parts of two credentials, however they are replaced, and no upload is lost."""
    sources = ("renamed", "written in place", "process")
    with ThreadPoolExecutor(len(sources)) as pool:
        # At the same time, for each takes as long as its credentials.
        for done in [pool.submit(_upload_while_tokens_rotate, seaweedfs, tmp_path, one) for one in sources]:
            done.result()


def _upload_while_tokens_rotate(seaweedfs: SeaweedFS, place: Path, source: str) -> None:
    tmp_path = place / source.replace(" ", "-")
    tmp_path.mkdir()
    file, printed = tmp_path / "credentials", tmp_path / "printed"

    def put(made: Triple) -> None:
        if source == "process":
            end = (datetime.now(timezone.utc) + timedelta(seconds=2)).isoformat()
            names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
            document = {"Version": 1, "Expiration": end, **dict(zip(names, made, strict=True))}
            (tmp_path / "new").write_text(json.dumps(document))
            (tmp_path / "new").rename(printed)
            return
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        lines = ["[default]\n", *(f"{name}={part}\n" for name, part in zip(names, made, strict=True))]
        place = file if source == "written in place" else tmp_path / "new"
        with open(place, "w", buffering=1) as written:
            for line in lines:
                written.write(line)
                # A slow writer, whose lines are seen one by one.
                threading.Event().wait(0.02)
        if source == "renamed":
            place.rename(file)

    if source == "process":
        file.write_text(f"[default]\ncredential_process = cat {printed}\n")
    url = seaweedfs.new_url()
    made = new_remote(seaweedfs.connect(url))
    environment = {
        "HOME": str(tmp_path),
        "AWS_SHARED_CREDENTIALS_FILE": str(file),
        "AWS_CONFIG_FILE": "/dev/null",
    }
    ids: list[str] = []
    with TokenProxy(seaweedfs.endpoint) as proxy, Rotation(proxy, put) as rotation:
        objects = connect_s3(url, proxy.endpoint, environment=environment)
        host = RemoteHost(tmp_path / "host", made._replace(objects=objects))
        while rotation.count < 6:
            ids.append(new_snapshot(host))
            host.upload()
        assert proxy.mixed == []
    assert_whole(made, tmp_path / "reader", *ids)
