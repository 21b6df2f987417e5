"""Object stores under the protocol of remotes: SeaweedFS, and azurite and Ceph where they are installed.

On each: 50 racers for one name, again and again, of whom one may win; then writers behind a proxy that loses
replies and requests and answers 503 at random, who create the same names: whoever is told that it won has its
content there, and no other writer is told so. Then hosts whose uploader is killed at random moments and which are
lost: every snapshot comes back on another machine, bit for bit, with encryption and without. On Ceph the proof
of create-only must refuse a versioned bucket, which overwrites. A server that is not installed has the figure 0.

On SeaweedFS also `ciuic remote upload` behind a network that fails, two minutes of 503 included, and a snapshot
of 512 MiB whose uploader is killed 40 times: at most a tenth of it is sent twice. With less than 300 seconds for
this torture both are smaller.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from support import upload_trials
from support.more_object_servers import Azurite, Ceph, azurite_program, ceph_is_installed
from support.object_servers import Fault, FaultProxy, Request, SeaweedFS, weed_program
from support.upload_trials import Server
from torture.figure import Figure

from ciuic.remote.objects.model import Objects, RemoteUnreachable
from ciuic.remote.objects.prove import CreateOnlyNotKept, prove_create_only

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


def run(seconds: float, seed: int) -> list[Figure]:
    """Torture one server after the other."""
    chance = random.Random(seed)
    kinds: list[tuple[str, bool, Callable[[Path], StoppableServer]]] = [
        ("SeaweedFS", weed_program() is not None, SeaweedFS),
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
    with FaultProxy(server.endpoint) as proxy:
        proxy.fault = _random_faults(chance)
        created, broken = _contests(server, proxy, time.monotonic() + seconds / 4)
        figures.append(Figure(f"creates behind faults on {name}", created, broken))
    figures += _lost_hosts(name, server, place, time.monotonic() + seconds / 2, chance)
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
