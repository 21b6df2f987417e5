"""Stores under the protocol of remotes: SeaweedFS, a directory, sshd, and azurite and Ceph where they are installed.

On each: 50 racers for one name, again and again, of whom one may win; then writers behind a proxy that loses
replies and requests and answers 503 at random, who create the same names: whoever is told that it won has its
content there, and no other writer is told so (not on a directory and over ssh, where no proxy fits between). Then hosts whose uploader is killed at random moments and which are
lost: every snapshot comes back on another machine, bit for bit, with encryption and without; and hosts that share one remote
with collections, all of which are killed (`support.shared_remote`). On Ceph the proof
of create-only must refuse a versioned bucket, which overwrites. A server that is not installed has the figure 0.

On SeaweedFS also `ciuic remote upload` behind a network that fails, two minutes of 503 included, and a snapshot
of 512 MiB whose uploader is killed 40 times: at most a tenth of it is sent twice. With less than 300 seconds for
this torture both are smaller.

Object stores that are not installed with the tests: azurite and Ceph, for `make torture ARGS=remote`.

azurite: ``npm install azurite``, then CIUIC_AZURITE names ``node_modules/.bin/azurite-blob``.
Ceph: Debian's radosgw, ceph-mon, ceph-osd, ceph-mgr and ceph-common; 1.5 GB of memory.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from support import upload_trials
from support.live import Commands
from support.object_servers import (
    ACCESS_KEY,
    SECRET_KEY,
    Fault,
    FaultProxy,
    Request,
    SeaweedFS,
    connect_s3,
    environment_for_s3,
    free_ports,
    weed_program,
)
from support.shared_remote import SharedRemote
from support.ssh_server import SshServer, sshd_program
from support.upload_trials import Server
from torture.figure import Figure

from ciuic.remote.objects.model import Objects, RemoteUnreachable
from ciuic.remote.objects.obstore_objects import Clients, ObstoreObjects
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.store_check import CreateOnlyNotKept, prove_create_only
from ciuic.remote.objects.urls import StoreSettings, parse_url

_CEPH_PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "ceph-mgr", "ceph", "radosgw-admin", "ceph-authtool")
_CEPH_SCRIPT = Path(__file__).with_name("ceph_up.sh")
_START_TIMEOUT_SECONDS = 240
# The account and key that every Azure emulator has, as its documentation says.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite_program() -> str:
    """Return the program of azurite, or an empty text."""
    named = os.environ.get("CIUIC_AZURITE", "")
    return named if named and os.access(named, os.X_OK) else shutil.which("azurite-blob") or ""


def ceph_is_installed() -> bool:
    """Return whether all programs of a Ceph with radosgw are there."""
    return all(shutil.which(program) for program in _CEPH_PROGRAMS)


class Azurite:
    """Emulator of Azure's blob store."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def start(self) -> None:
        """Start the server and make a container."""
        self._place.mkdir(parents=True)
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        options = [
            "--silent",
            "--location",
            str(self._place),
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(port),
        ]
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            azurite_program(),
            *options,
            "--skipApiVersionCheck",
            # Tests send nobody anything.
            "--disableTelemetry",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        _wait_for_port(port)
        assert self._make_container("tests") == 201

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def new_url(self) -> str:
        """Return the URL of a new prefix."""
        return f"az://tests/{uuid.uuid4().hex}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the environment in which programs find this server, perhaps through a proxy."""
        fields = f"AccountName={_AZURE_ACCOUNT};AccountKey={_AZURE_KEY};"
        text = f"{fields}BlobEndpoint={endpoint or self.endpoint}/{_AZURE_ACCOUNT}"
        return {"AZURE_STORAGE_CONNECTION_STRING": text, "NO_PROXY": "127.0.0.1"}

    def connect(self, url: str, endpoint: str = "") -> ObstoreObjects:
        """Return a client, perhaps through a proxy."""
        where, settings = parse_url(url), StoreSettings()
        return ObstoreObjects(where, settings, clients=Clients(where, settings, self.environment(endpoint)))

    def _make_container(self, name: str) -> int:
        """Make a container, which obstore does not; "Authorize with Shared Key", Azure Storage REST API."""
        now = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
        lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
        resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{name}\nrestype:container"
        text = "PUT" + "\n" * 12 + lines + resource
        tag = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(tag).decode()}"
        path = f"/{_AZURE_ACCOUNT}/{name}?restype=container"
        return _ask(self.endpoint, "PUT", path, headers, b"")


class Ceph:
    """One-node Ceph with radosgw: an old store that knows If-None-Match in part."""

    endpoint = "http://127.0.0.1:17480"

    def __init__(self, place: Path) -> None:
        self._place = place

    def start(self) -> None:
        """Start the daemons, and make a bucket and a versioned one."""
        self._place.mkdir(parents=True)
        environment = {**os.environ, "ACCESS_KEY": ACCESS_KEY, "SECRET_KEY": SECRET_KEY}
        log = self._place.with_suffix(".log")
        with open(log, "wb") as output:
            subprocess.run(
                ["bash", str(_CEPH_SCRIPT), str(self._place)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=_START_TIMEOUT_SECONDS,
                check=True,
            )
        for bucket in ("tests", "versioned"):
            assert self._signed("PUT", f"/{bucket}", "", b"") == 200
        xml = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        assert self._signed("PUT", "/versioned", "versioning", xml) == 200

    def stop(self) -> None:
        """Kill the daemons that the script started."""
        for file in (self._place / "run").glob("*.pid"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)

    def new_url(self, bucket: str = "tests") -> str:
        """Return the URL of a new prefix."""
        return f"s3://{bucket}/{uuid.uuid4().hex}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the environment in which programs find this server, perhaps through a proxy."""
        return environment_for_s3(endpoint or self.endpoint)

    def connect(self, url: str, endpoint: str = "") -> ObstoreObjects:
        """Return a client, perhaps through a proxy."""
        return connect_s3(url, endpoint or self.endpoint)

    def _signed(self, method: str, path: str, query: str, body: bytes) -> int:
        """Send a signed request about a bucket, which obstore has none for; AWS Signature Version 4."""
        now = datetime.now(timezone.utc)
        date, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        headers = {
            "host": self.endpoint.removeprefix("http://"),
            "x-amz-content-sha256": digest,
            "x-amz-date": stamp,
        }
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        asked = f"{quote(query)}=" if query else ""
        request = "\n".join([method, path, asked, lines, names, digest])
        scope = f"{date}/us-east-1/s3/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = b"AWS4" + SECRET_KEY.encode()
        for part in (date, "us-east-1", "s3", "aws4_request", text):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
        )
        return _ask(self.endpoint, method, path + (f"?{query}" if query else ""), headers, body)


def _ask(endpoint: str, method: str, path: str, headers: dict[str, str], body: bytes) -> int:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


RACERS = 50
MAX_ROUNDS = 100
_LANES = 25
"""Races for different names at one time: SeaweedFS lets each racer wait a second or more for a lock, and does little meanwhile."""
_WRITERS = 6
_FAULT_SHARE = 0.25
MAX_SENT_TWICE = 0.1
_NETWORK_RATE = 12 << 20
"""At which 40 kills take a minute, and each comes while packs are under way."""
_FULL_SECONDS = 300


class StoppableServer(Server, Protocol):
    """Object store that this torture starts and stops."""

    def start(self) -> None:
        """Start it."""

    def stop(self) -> None:
        """Kill it."""


class Directory:
    """Directory as a store, such as a mounted file server."""

    endpoint = ""

    def __init__(self, place: Path) -> None:
        self._place = place

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return no variables."""
        return {}

    def new_url(self) -> str:
        """Return the URL of a new directory."""
        return f"file://{self._place}/{uuid.uuid4().hex}"

    def connect(self, url: str, endpoint: str = "") -> Objects:
        """Return the objects."""
        return open_objects(url, make=True)


def run(seconds: float, seed: int) -> list[Figure]:
    """Torture one server after the other."""
    chance = random.Random(seed)
    kinds: list[tuple[str, bool, Callable[[Path], StoppableServer]]] = [
        ("SeaweedFS", weed_program() is not None, SeaweedFS),
        ("a directory", True, Directory),
        ("sshd", bool(sshd_program()), SshServer),
        ("azurite", bool(azurite_program()), Azurite),
        ("Ceph", ceph_is_installed(), Ceph),
    ]
    there = sum(installed for _, installed, _ in kinds)
    figures = []
    for name, installed, make in kinds:
        if not installed:
            figures.append(Figure(f"races on {name} (not installed)", 0))
            continue
        with tempfile.TemporaryDirectory() as place:
            server = make(Path(place, "server"))
            try:
                server.start()
                figures += _torture(name, server, Path(place), seconds / there, chance)
            finally:
                server.stop()
    return figures


def _torture(
    name: str, server: StoppableServer, place: Path, seconds: float, chance: random.Random
) -> list[Figure]:
    deadline = time.monotonic() + seconds / 4
    url = server.new_url()
    prove_create_only(lambda: server.connect(url))
    rounds, broken = _races([server.connect(url) for _ in range(RACERS)], deadline)
    figures = [Figure(f"races of {RACERS} on {name}", rounds, broken)]
    if server.endpoint:
        with FaultProxy(server.endpoint) as proxy:
            proxy.fault = _random_faults(chance)
            created, broken = _contests(server, proxy, time.monotonic() + seconds / 4)
            figures.append(Figure(f"creates behind faults on {name}", created, broken))
    figures += _lost_hosts(name, server, place, time.monotonic() + seconds / 4, chance)
    figures += _shared(name, server, place, time.monotonic() + seconds / 4, chance)
    if isinstance(server, Ceph):
        figures.append(_versioned(server))
    if isinstance(server, SeaweedFS):
        figures += _one_upload(server, place, seconds, chance)
    return figures


def _lost_hosts(
    name: str, server: Server, place: Path, deadline: float, chance: random.Random
) -> list[Figure]:
    """Lose hosts until the time is up, one with encryption and one without at least."""
    kills = {True: 0, False: 0}
    flaws: dict[bool, list[str]] = {True: [], False: []}
    number = 0
    while number < 2 or time.monotonic() < deadline:
        sealed = number % 2 == 0
        lost = Path(tempfile.mkdtemp(prefix="host-", dir=place))
        found = upload_trials.killed_and_lost(
            server, lost, chance, sealed=sealed, snapshots=chance.randint(2, 4)
        )
        kills[sealed] += found.counted
        flaws[sealed] += found.flaws
        number += 1
    return [
        Figure(f"uploaders killed on {name}, {kind}", kills[sealed], tuple(flaws[sealed]))
        for sealed, kind in ((True, "encrypted"), (False, "in clear"))
    ]


def _shared(name: str, server: Server, place: Path, deadline: float, chance: random.Random) -> list[Figure]:
    """Kill everything that uses a remote of several hosts until the time is up, for a round at least."""
    with Commands.warm():
        shared = SharedRemote(server, Path(tempfile.mkdtemp(prefix="shared-", dir=place)), chance)
        try:
            shared.round()
            while time.monotonic() < deadline and not shared.flaws:
                shared.round()
        finally:
            shared.close()
    return [
        Figure(f"kills of hosts and collections that share {name}", shared.kills.total()),
        *(Figure(f"of these: {what}", count) for what, count in sorted(shared.kills.items())),
        Figure("snapshots restored between them", shared.restored, tuple(shared.flaws)),
    ]


def _one_upload(server: Server, place: Path, seconds: float, chance: random.Random) -> list[Figure]:
    """Upload behind faults, and with kills on a slow network."""
    full = seconds >= _FULL_SECONDS
    (place / "faults").mkdir()
    found = upload_trials.behind_faults(
        server,
        place / "faults",
        chance,
        snapshots=12 if full else 4,
        unavailable_seconds=120 if full else 10,
    )
    (place / "kills").mkdir()
    size_bytes, kills = (512 << 20, 40) if full else (64 << 20, 2)
    sent = upload_trials.killed_on_the_way(
        server, place / "kills", chance, size_bytes=size_bytes, kills=kills, bytes_per_second=_NETWORK_RATE
    )
    flaws = list(sent.flaws)
    if sent.excess > MAX_SENT_TWICE:
        flaws.append(f"{sent.excess:.1%} was sent twice with {kills} kills, more than {MAX_SENT_TWICE:.0%}")
    return [
        Figure("faults between an uploader and its store", found.counted, found.flaws),
        Figure(f"kills while {size_bytes >> 20} MiB were sent", kills, tuple(flaws)),
        Figure("bodies that these kills cut", sent.cut_bodies),
        Figure("of that sent twice, per mille", round(1000 * sent.excess)),
    ]


def _races(clients: list[Objects], deadline: float) -> tuple[int, tuple[str, ...]]:
    """Race in several lanes, each for names of its own, until the time or the rounds are up."""
    broken: list[str] = []
    rounds = itertools.count()
    done = []

    def lane(_number: int) -> None:
        with ThreadPoolExecutor(len(clients)) as threads:
            # next() of a count is one step of the interpreter.
            while (number := next(rounds)) < MAX_ROUNDS and (time.monotonic() < deadline or not done):
                broken.extend(_race(clients, f"race/{number}", threads))
                done.append(number)

    with ThreadPoolExecutor(_LANES) as lanes:
        list(lanes.map(lane, range(_LANES)))
    return len(done), tuple(broken)


def _race(clients: list[Objects], name: str, threads: ThreadPoolExecutor) -> list[str]:
    barrier = threading.Barrier(len(clients))

    def race(number: int) -> bool:
        barrier.wait(60)
        return clients[number].create(name, b"%d" % number)

    won = [number for number, winner in enumerate(threads.map(race, range(len(clients)))) if winner]
    there = clients[0].get(name)
    if [b"%d" % number for number in won] == [there]:
        return []
    return [f"{name}: {won} were told that they won, and {there!r} is there"]


def _random_faults(chance: random.Random) -> Callable[[Request], Fault | None]:
    def fault(_request: Request) -> Fault | None:
        if chance.random() >= _FAULT_SHARE:
            return None
        return chance.choice(
            [Fault(status=503), Fault(drops_request=True), Fault(drops_reply=True), Fault(cuts_reply_at=0)]
        )

    return fault


def _contests(server: Server, proxy: FaultProxy, deadline: float) -> tuple[int, tuple[str, ...]]:
    """Let writers create the same names in the same order, each with a nonce, until the time is up."""
    url = server.new_url()
    claims: dict[str, list[bytes]] = {}
    broken: list[str] = []
    lock = threading.Lock()

    def write(_number: int) -> None:
        objects = server.connect(url, proxy.endpoint)
        number = 0
        while time.monotonic() < deadline:
            name, nonce = f"w/log/{number:010}", os.urandom(16)
            try:
                won = objects.create(name, nonce)
                # A writer whose reply was lost finds out by reading, as the protocol says.
                there = objects.get(name)
            except RemoteUnreachable:
                continue
            with lock:
                if won and there != nonce:
                    broken.append(f"{name}: a writer was told that it won, and another's content is there")
                if there == nonce:
                    claims.setdefault(name, []).append(nonce)
            number += 1

    with ThreadPoolExecutor(_WRITERS) as threads:
        list(threads.map(write, range(_WRITERS)))
    direct = server.connect(url)
    infos = list(direct.list("w/"))
    for info in infos:
        there = direct.get(info.name)
        if len(there) != 16:
            broken.append(f"{info.name} is torn: {len(there)} bytes")
        # Nobody may have claimed it: the winner's answer and its read can both be lost.
        if claims.get(info.name, [there]) != [there]:
            broken.append(f"{info.name}: claimed by another than whose content is there")
    broken += [f"{name} was claimed and is gone" for name in claims.keys() - {info.name for info in infos}]
    if not infos:
        broken.append("nothing was created in the time")
    return len(infos), tuple(broken)


def _versioned(server: Ceph) -> Figure:
    """A versioned bucket of this Ceph overwrites: the proof must notice."""
    url = server.new_url("versioned")
    try:
        prove_create_only(lambda: server.connect(url))
    except CreateOnlyNotKept:
        return Figure("buckets of Ceph that do not keep create-only, refused", 1)
    return Figure("buckets of Ceph that do not keep create-only, refused", 0, ("the proof passed",))
