"""Answers to the probes of kubelet, over HTTP from the process that is asked: no program is started for one.

References: Kubernetes, "Configure Liveness, Readiness and Startup Probes": any status from 200 to 399 is success.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from ciuic.operator.policies import HEALTH_PORT

_ANSWER_SECONDS: Final = 5.0

Check = Callable[[], Awaitable[object]]


async def alive() -> None:
    """Return: what answers lives."""


@asynccontextmanager
async def serving_health(
    checks: Mapping[str, Check], port: int = HEALTH_PORT, host: str | None = None
) -> AsyncIterator[int]:
    """Answer probes while the block lasts; a check that raises, or takes longer than 5 s, is status 503 with its words.

    Args:
        checks: what to await for each path.
        port: TCP port; 0: any that is free.
        host: its address; None: all of the pod.

    Yields:
        The port.
    """
    # Concurrent probes share one check.
    asked: dict[str, asyncio.Task[object]] = {}

    async def answer(request: web.Request) -> web.Response:
        path = request.path
        if path not in asked or asked[path].done():
            asked[path] = asyncio.ensure_future(asyncio.wait_for(checks[path](), _ANSWER_SECONDS))
        try:
            await asyncio.shield(asked[path])
        except asyncio.TimeoutError:
            return web.Response(status=503, text="no answer in time\n")
        except Exception as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(text="ok\n")

    application = web.Application(client_max_size=1)
    for path in checks:
        application.router.add_get(path, answer)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=_ANSWER_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=16)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
