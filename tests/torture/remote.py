"""Object stores under the protocol of remotes: SeaweedFS, and azurite and Ceph where they are installed.

On each: 50 racers for one name, again and again, of whom one may win; then writers behind a proxy that loses
replies and requests and answers 503 at random, who create the same names: whoever is told that it won has its
content there, and nobody else is told so. On Ceph the proof of create-only must refuse a versioned bucket,
which overwrites. A server that is not installed has the figure 0.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from support.more_object_servers import Azurite, Ceph, azurite_program, ceph_is_installed
from support.object_servers import Fault, FaultProxy, Request, SeaweedFS, weed_program
from torture.figure import Figure

from ciuic.remote.objects.model import Objects, RemoteUnreachable
from ciuic.remote.objects.prove import CreateOnlyNotKept, prove_create_only

RACERS = 50
MAX_ROUNDS = 100
_WRITERS = 6
_FAULT_SHARE = 0.25


class Server(Protocol):
    """Object store that this torture starts and stops."""

    endpoint: str

    def start(self) -> None:
        """Start it."""

    def stop(self) -> None:
        """Kill it."""

    def new_url(self) -> str:
        """Return a new prefix."""

    def connect(self, url: str, endpoint: str = "") -> Objects:
        """Return a client."""


def run(seconds: float, seed: int) -> list[Figure]:
    """Torture one server after the other."""
    chance = random.Random(seed)
    kinds: list[tuple[str, bool, Callable[[Path], Server]]] = [
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
                figures += _torture(name, server, seconds / there, chance)
            finally:
                server.stop()
    return figures


def _torture(name: str, server: Server, seconds: float, chance: random.Random) -> list[Figure]:
    deadline = time.monotonic() + seconds / 2
    url = server.new_url()
    prove_create_only(lambda: server.connect(url))
    rounds, broken = _races([server.connect(url) for _ in range(RACERS)], deadline)
    figures = [Figure(f"races of {RACERS} on {name}", rounds, broken)]
    with FaultProxy(server.endpoint) as proxy:
        proxy.fault = _random_faults(chance)
        created, broken = _contests(server, proxy, time.monotonic() + seconds / 2)
        figures.append(Figure(f"creates behind faults on {name}", created, broken))
    if isinstance(server, Ceph):
        figures.append(_versioned(server))
    return figures


def _races(clients: list[Objects], deadline: float) -> tuple[int, tuple[str, ...]]:
    broken = []
    rounds = 0
    with ThreadPoolExecutor(len(clients)) as threads:
        while rounds < MAX_ROUNDS and (time.monotonic() < deadline or not rounds):
            name = f"race/{rounds}"
            barrier = threading.Barrier(len(clients))

            def race(number: int, name: str = name, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait(60)
                return clients[number].create(name, b"%d" % number)

            won = [number for number, winner in enumerate(threads.map(race, range(len(clients)))) if winner]
            there = clients[0].get(name)
            if [b"%d" % number for number in won] != [there]:
                broken.append(f"{name}: {won} were told that they won, and {there!r} is there")
            rounds += 1
    return rounds, tuple(broken)


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
