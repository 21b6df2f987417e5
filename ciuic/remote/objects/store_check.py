"""Prove that a bucket keeps what the protocol needs, create-only and list-after-create; and measure it.

Create-only fails silently where it fails: radosgw before version 18 and some versioned buckets answer 200 and
overwrite, and OSS ignores its header in a versioned bucket. So no answer counts alone. Many racers create one
name at one moment, each with a client and a nonce of its own; then, at once, after a pause, and after each
loser has tried once more, the object must be that of the one winner.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from ciuic.errors import CiuicError
from ciuic.remote.objects.model import NoSuchObject, Objects, RemoteRefused, RemoteUnreachable

PROOF_PREFIX: Final = "proof/"
"""Names of what is made here; all of it is deleted again where deleting is allowed."""
RACERS: Final = 16
ROUNDS: Final = 3
_PAUSE_SECONDS: Final = 1.0
_BARRIER_TIMEOUT_SECONDS: Final = 60
_MIB: Final = 1 << 20


class CreateOnlyNotKept(CiuicError):
    """The bucket does not keep create-only: hosts would overwrite one another's commits."""


class ListingNotKept(CiuicError):
    """The bucket lists an object later than it is created: collectors would miss commits."""


class Proof(NamedTuple):
    """What proved that a store keeps create-only, and what is left of it there."""

    races: int
    racers: int
    left: tuple[str, ...]
    """Names that could not be deleted, as these credentials do not allow it."""


class Measurement(NamedTuple):
    """Figures that `measure` has measured; rates in bytes a second, seconds for one request."""

    proof: Proof
    small_put_seconds: float
    """Median of creates of 200 bytes."""
    small_get_seconds: float
    list_seconds: float
    put_bytes_per_second: float
    """Rate of all threads together."""
    get_bytes_per_second: float
    range_seconds: float
    """Median of reads of 256 KiB."""


def prove_create_only(
    connect: Callable[[], Objects],
    *,
    racers: int = RACERS,
    rounds: int = ROUNDS,
    pause_seconds: float = _PAUSE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Proof:
    """Race for names in the bucket; return if each had one winner, whose object stayed and was listed at once.

    Args:
        connect: opens the remote with a client of its own; called once for each racer.
        racers: threads that create one name at once.
        rounds: races.
        pause_seconds: pause before an object is read again.
        sleep: waits that long.

    Raises:
        CreateOnlyNotKept: the bucket overwrote an object, or had two winners.
        ListingNotKept: a listing lacked an object that was there.
        RemoteUnreachable, RemoteRefused, NoSuchBucket: a request failed otherwise.
    """
    clients = [connect() for _ in range(racers)]
    names = [f"{PROOF_PREFIX}{os.urandom(16).hex()}" for _ in range(rounds)]
    try:
        # A store that does not answer the first request is asked no other: each would be repeated for as long.
        next(clients[0].list(PROOF_PREFIX), None)
        try:
            # At once, for the sake of their pauses: a training waits for this before its first step.
            with ThreadPoolExecutor(rounds, thread_name_prefix="race") as threads:
                for raced in [threads.submit(_race, clients, name, pause_seconds, sleep) for name in names]:
                    raced.result()
        finally:
            left = _delete(clients[0], names)
    finally:
        for client in clients:
            client.close()
    return Proof(rounds, racers, left)


def _race(
    clients: Sequence[Objects], name: str, pause_seconds: float, sleep: Callable[[float], None]
) -> None:
    nonces = [os.urandom(16).hex().encode() for _ in clients]
    winner = _started_together(clients, name, nonces)
    _expect(clients[0], name, winner, "right after the race")
    # Collectors delete what no log in a listing needs: what was created is listed from then on, to everybody.
    for client in (clients[0], clients[-1]):
        if not any(info.name == name for info in client.list(PROOF_PREFIX)):
            raise ListingNotKept(
                f"{client.url} does not list what was created before: its listing of {PROOF_PREFIX} lacks {name}",
                hint="use a store whose listings are strongly consistent, without a caching proxy before it; "
                "see docs/remote-format.md, section 1",
            )
    sleep(pause_seconds)
    _expect(clients[-1], name, winner, f"{pause_seconds:g} s after the race")
    for client, nonce in zip(clients, nonces, strict=True):
        if nonce != winner and client.create(name, nonce):
            raise _not_kept(client, name, "it created a name that was taken, and answered with success")
    _expect(clients[0], name, winner, "after the losers tried again")
    sleep(pause_seconds)
    _expect(clients[-1], name, winner, "at the end")


def _started_together(clients: Sequence[Objects], name: str, nonces: Sequence[bytes]) -> bytes:
    """Let every client create the name at one moment; return the winner's nonce."""
    barrier = threading.Barrier(len(clients))

    def create(client: Objects, nonce: bytes) -> bool | RemoteUnreachable:
        barrier.wait(_BARRIER_TIMEOUT_SECONDS)
        try:
            return client.create(name, nonce)
        except RemoteUnreachable as error:
            # It may have been done; what is there decides.
            return error

    with ThreadPoolExecutor(len(clients)) as threads:
        results = list(threads.map(create, clients, nonces))
    winners = [nonce for nonce, result in zip(nonces, results, strict=True) if result is True]
    if len(winners) > 1:
        raise _not_kept(clients[0], name, f"{len(winners)} of {len(clients)} racers created one name")
    try:
        there = clients[0].get(name)
    except NoSuchObject:
        for result in results:
            if isinstance(result, RemoteUnreachable) and not winners:
                # A store that took nothing, as one without room, broke no promise.
                raise result from None
        raise _not_kept(clients[0], name, "after the race there is no object") from None
    # A racer that was told False, or nothing, may have won: its first reply was lost, and it asked again.
    if there not in nonces:
        raise _not_kept(clients[0], name, "the object is none that a racer wrote")
    return winners[0] if winners else there


def _expect(client: Objects, name: str, winner: bytes, when: str) -> None:
    try:
        there = client.get(name)
    except NoSuchObject:
        raise _not_kept(client, name, f"the object of the winner is gone {when}") from None
    if there != winner:
        raise _not_kept(client, name, f"the object is not the winner's {when}: it was overwritten")


def _not_kept(client: Objects, name: str, what: str) -> CreateOnlyNotKept:
    return CreateOnlyNotKept(
        f"{client.url} does not keep create-only: {what} ({name})",
        hint="use a store that refuses If-None-Match on a name that is taken, and an unversioned bucket; "
        "see docs/remote-format.md, section 1",
    )


def _delete(client: Objects, names: Sequence[str]) -> tuple[str, ...]:
    """Delete what was made; return what could not be."""
    try:
        client.delete(names)
    except (RemoteRefused, RemoteUnreachable):
        return tuple(names)
    return ()


def measure(
    connect: Callable[[], Objects],
    *,
    threads: int = 4,
    object_bytes: int = 16 * _MIB,
    objects: int = 8,
    small: int = 20,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Measurement:
    """Prove create-only, then measure writes, reads, ranges and listing; for ``ciuic remote test``.

    Writes and reads ``objects * object_bytes``, which is deleted again.

    Raises:
        CreateOnlyNotKept, RemoteUnreachable, RemoteRefused, NoSuchBucket: as `prove_create_only`.
    """
    proof = prove_create_only(connect, sleep=sleep)
    client = connect()
    top = f"{PROOF_PREFIX}{os.urandom(16).hex()}"
    large = [f"{top}/large-{number}" for number in range(objects)]
    little = [f"{top}/small-{number}" for number in range(small)]
    # Random, for a store that compresses would look faster than it is.
    body = os.urandom(object_bytes)

    def timed(call: Callable[[], object]) -> float:
        started = clock()
        call()
        return clock() - started

    def all_of(call: Callable[[str], object]) -> Callable[[], object]:
        def run() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(call, large))

        return run

    try:
        put = timed(all_of(lambda name: client.put(name, [body])))
        got = timed(all_of(client.get))
        puts = [timed(lambda name=name: client.create(name, body[:200])) for name in little]  # type: ignore[misc]
        gets = [timed(lambda name=name: client.get(name)) for name in little]  # type: ignore[misc]
        spans = [(number * object_bytes // small, 256 << 10) for number in range(small)]
        ranges = [timed(lambda span=span: client.get_ranges(large[0], [span])) for span in spans]  # type: ignore[misc]
        listed = timed(lambda: list(client.list(f"{top}/")))
    finally:
        left = _delete(client, [*large, *little])
        client.close()
    moved = object_bytes * objects
    return Measurement(
        proof=proof._replace(left=(*proof.left, *left)),
        small_put_seconds=_median(puts),
        small_get_seconds=_median(gets),
        list_seconds=listed,
        put_bytes_per_second=moved / max(put, 1e-9),
        get_bytes_per_second=moved / max(got, 1e-9),
        range_seconds=_median(ranges),
    )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
