"""Watches of the API by Kopf, whose events come to the caller's event loop in their order.

Guarantees: each event loop of Kopf has a thread of its own, because Kopf ends every task of the loop that it runs in, takes the process's signals,
and watches one set of namespaces only. Its handlers are those of raw events, which write nothing into objects; it looks at nothing else,
so that list and watch of these resources are the only rights that it needs. A watch that breaks is begun anew, with all objects.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import kopf


@dataclass(frozen=True)
class Watch:
    """A resource to watch, in the whole cluster or in one namespace, and what is called with each event."""

    group: str
    version: str
    plural: str
    handle: Callable[[Mapping[str, Any]], None]
    namespace: str | None = None
    label: str | None = None
    """Label that the objects must have."""


async def watch(
    watches: Iterable[Watch], stop: asyncio.Event, connection: Callable[[], kopf.ConnectionInfo]
) -> None:
    """Watch until ``stop`` is set. Handlers are called in this event loop. Raises what ended a watch before."""
    loop, ending = asyncio.get_running_loop(), threading.Event()
    places: dict[str | None, list[Watch]] = {}
    for one in watches:
        places.setdefault(one.namespace, []).append(one)
    running = [
        asyncio.create_task(asyncio.to_thread(_run, namespace, found, loop, ending, connection))
        for namespace, found in places.items()
    ]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.set()
        stopping.cancel()
        await asyncio.gather(*running)


def _run(
    namespace: str | None,
    watches: list[Watch],
    loop: asyncio.AbstractEventLoop,
    ending: threading.Event,
    connection: Callable[[], kopf.ConnectionInfo],
) -> None:
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login_by(connection))
    kopf.on.startup(registry=registry)(_configure)
    for one in watches:
        labels: Any = None if one.label is None else {one.label: kopf.PRESENT}
        forward = _forward_to(one.handle, loop)
        kopf.on.event(one.group, one.version, one.plural, labels=labels, registry=registry)(forward)
    place: dict[str, Any] = {"clusterwide": True} if namespace is None else {"namespaces": [namespace]}
    asyncio.run(kopf.operator(registry=registry, standalone=True, stop_flag=ending, **place))


def _forward_to(handle: Callable[[Mapping[str, Any]], None], loop: asyncio.AbstractEventLoop) -> Any:
    async def forward(event: Mapping[str, Any], **_: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: it is the end
            loop.call_soon_threadsafe(handle, event)

    return forward


def _login_by(connection: Callable[[], kopf.ConnectionInfo]) -> Any:
    def login(**_: Any) -> kopf.ConnectionInfo:
        return connection()

    return login


async def _configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.scanning.disabled = True
    settings.posting.enabled = False
