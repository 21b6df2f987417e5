"""Carry out a thaw: ask the store once for each pack, and find out what is ready.

Guarantee: a job is durable before the first request, and each pack is asked for until the store has said yes once; killed
anywhere, `continue_thaw` goes on. Nothing is changed but what the store charges.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ciuic.remote.objects.model import NoSuchObject, RemoteUnreachable
from ciuic.remote.objects.storage_classes import ObjectClass, ObjectClasses, ThawSpeed, find_class
from ciuic.remote.tiers.thaw_job import PackState, ThawJob, ThawJobs

DEFAULT_DAYS: Final = 7
"""Days for which a thawed copy stays: long enough for a restore after the weekend."""
MAX_DAYS: Final = 365
_THREADS: Final = 8
# Packs after which the job is stored: a kill has at most so many asked for twice.
_BATCH: Final = 64
_HOUR_NS: Final = 3600 * 10**9


def begin_thaw(
    jobs: ThawJobs,
    classes: ObjectClasses,
    *,
    url: str,
    snapshots: Sequence[str],
    paths: Sequence[str],
    packs: Mapping[str, int],
    speed: ThawSpeed,
    days: int,
    now_ns: int,
) -> ThawJob:
    """Make a job, ask for its packs, and return it; durable before the store is asked.

    Args:
        jobs: Jobs of this host.
        classes: Storage classes of the remote.
        url: URL of the remote.
        snapshots: Snapshots that are thawed.
        paths: Paths of them; none for everything.
        packs: Size of each cold pack that they need, by its name.
        speed: Speed of the thaw.
        days: Days for which the thawed copies stay.
        now_ns: Time now.

    Raises:
        RemoteUnreachable, RemoteRefused: the store does not answer or allow it; `continue_thaw` goes on.
    """
    job = ThawJob(
        id=os.urandom(8).hex(),
        url=url,
        snapshots=tuple(snapshots),
        paths=tuple(paths),
        speed=speed,
        days=days,
        created_ns=now_ns,
        size_bytes=sum(packs.values()),
        packs=dict.fromkeys(packs, "wanted"),
    )
    jobs.store(job)
    return continue_thaw(jobs, classes, job, now_ns=now_ns)


def continue_thaw(jobs: ThawJobs, classes: ObjectClasses, job: ThawJob, *, now_ns: int) -> ThawJob:
    """Ask for what was not asked for, find out what is ready, and return the job as it is now.

    Raises:
        RemoteUnreachable, RemoteRefused: the store does not answer or allow it.
    """
    packs = dict(job.packs)
    ready_by_ns = job.ready_by_ns
    waiting = job.waiting

    def settle(name: str) -> tuple[PackState, float]:
        """Return the new state of a pack and the hours for which to wait, 0 where that is known."""
        try:
            seen = classes.look(name)
            if seen.state == "archived":
                classes.thaw(name, job.speed, job.days)
        except NoSuchObject:
            # A collection has copied what was needed, or the pack is lost: a restore says which.
            return "ready", 0
        if seen.state == "ready":
            return "ready", 0
        return "asked", hours_of(classes, seen, job.speed)

    for start in range(0, len(waiting), _BATCH):
        names = waiting[start : start + _BATCH]
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, (state, hours) in zip(names, pool.map(settle, names), strict=True):
                if state == "asked" and packs[name] == "wanted":
                    ready_by_ns = max(ready_by_ns or 0, now_ns + int(hours * _HOUR_NS))
                packs[name] = state
        job.packs, job.ready_by_ns, job.polled_ns = packs, ready_by_ns, now_ns
        jobs.store(job)
    return job


def wait_until_ready(
    jobs: ThawJobs,
    classes: ObjectClasses,
    job: ThawJob,
    *,
    now_ns: Callable[[], int],
    sleep: Callable[[float], None],
    poll_seconds: float,
    between: Callable[[ThawJob], None] = lambda job: None,
) -> ThawJob:
    """Return the job when everything can be read. A store that does not answer is asked again later."""
    while not job.is_ready:
        between(job)
        sleep(poll_seconds)
        try:
            job = continue_thaw(jobs, classes, job, now_ns=now_ns())
        except RemoteUnreachable:
            continue
    return job


def hours_of(classes: ObjectClasses, seen: ObjectClass, speed: ThawSpeed) -> float:
    """Return the hours that the store's documentation gives for a thaw; those of the slowest where it has not this speed."""
    hours = find_class(classes.scheme, seen.name).thaw_hours
    return hours.get(speed) or max(hours.values(), default=0.0)
