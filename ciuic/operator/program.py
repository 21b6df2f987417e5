"""``ciuic-operator``: the controller of a cluster; ``agent``: the agent of a node; ``configure``: copy its configuration (docs/kubernetes.md).

Environment of the controller: POD_NAMESPACE, POD_NAME, CIUIC_IMAGE, CIUIC_IMAGE_PULL_POLICY. Of the agent: NODE_NAME. Of both: CIUIC_HEALTH_PORT
(9848; 0: any that is free), at which they answer probes.

Exit codes: 0 after SIGTERM, 2 for a wrong environment, 5 where the API cannot be reached, 75 when the lease of the leader was lost, after which
the pod's restart competes for it anew.

Answers to the probes of kubelet, over HTTP from the process that is asked: no program is started for one.

References: Kubernetes, "Configure Liveness, Readiness and Startup Probes": any status from 200 to 399 is success.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web

from ciuic.errors import CiuicError, UsageError, pip_install
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


_USAGE: Final = "usage: ciuic-operator [agent | configure]\n"
_LOST: Final = 75
_UNREACHABLE: Final = 5
_log = structlog.get_logger(__name__)


def main() -> None:
    """Run the program that the arguments name."""
    words = sys.argv[1:]
    if words not in ([], ["agent"], ["configure"]):
        sys.stderr.write(_USAGE)
        sys.exit(0 if words in (["-h"], ["--help"]) else 2)
    try:
        import kopf  # noqa: F401, its absence is said in words
    except ImportError:
        sys.stderr.write(
            f"ciuic-operator: error: Kopf is not installed: {pip_install('ciuic[operator]')} (Python 3.11 or later)\n"
        )
        sys.exit(2)
    from ciuic.operator.api import ApiError

    try:
        if words == ["configure"]:
            from ciuic.operator.agent import copy_configuration

            copy_configuration(*_configuration())
            return
        sys.exit(asyncio.run(run_agent() if words else run_controller()))
    except ApiError as error:
        sys.stderr.write(f"ciuic-operator: error: {error}\n")
        sys.exit(_UNREACHABLE)
    except CiuicError as error:
        sys.stderr.write(f"ciuic-operator: error: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        sys.stderr.write(f"ciuic-operator: error: {error}\n")
        sys.exit(1)


async def run_controller() -> int:
    """Wait for the lease, act while it is held, and give it back after SIGTERM; return the exit code."""
    from ciuic.operator.api import Api, LeaderLease
    from ciuic.operator.controller import Controller
    from ciuic.operator.policies import ALIVE, Installation

    namespace = _needed("POD_NAMESPACE")
    installation = Installation(
        namespace, _needed("CIUIC_IMAGE"), os.environ.get("CIUIC_IMAGE_PULL_POLICY", "IfNotPresent")
    )
    stop = _stop_on_signals()
    async with Api() as api, serving_health({ALIVE: alive}, _health_port()):
        lease = LeaderLease(api, namespace, _needed("POD_NAME"))
        acquiring, stopping = asyncio.create_task(lease.acquire()), asyncio.create_task(stop.wait())
        await asyncio.wait((acquiring, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not acquiring.done():
            acquiring.cancel()
            return 0
        acquiring.result()
        _log.info("leading", namespace=namespace)
        keeping = asyncio.create_task(lease.keep())
        acting = asyncio.create_task(Controller(api, installation).run(stop))
        await asyncio.wait((keeping, acting), return_when=asyncio.FIRST_COMPLETED)
        if keeping.done() and not acting.done():
            # At once, by the process's end: another controller may act from now on.
            os._exit(_LOST)
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        acting.result()
        await lease.release()
    return 0


async def run_agent() -> int:
    """Carry out the requests of this node until SIGTERM; return the exit code."""
    from ciuic.operator.agent import Agent, LocalDaemon
    from ciuic.operator.api import Api
    from ciuic.operator.policies import ALIVE, READY

    daemon = LocalDaemon()
    # A thread of its own: others wait for snapshots, each for as long as one takes.
    answers = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    checks: dict[str, Check] = {
        ALIVE: alive,
        READY: lambda: loop.run_in_executor(answers, daemon.answer),
    }
    async with Api() as api, serving_health(checks, _health_port()):
        agent = Agent(api, _needed("NODE_NAME"), daemon, configuration=_configuration())
        await agent.run(_stop_on_signals())
    return 0


def _configuration() -> tuple[Path, Path]:
    """Return where kubelet mounts the configuration, and where the programs of the pod read it."""
    from ciuic.operator.policies import CONFIG_DIR, CONFIG_FILE, CONFIG_MAP_DIR

    return Path(CONFIG_MAP_DIR, CONFIG_FILE), Path(CONFIG_DIR, CONFIG_FILE)


def _health_port() -> int:
    from ciuic.operator.policies import HEALTH_PORT

    text = os.environ.get("CIUIC_HEALTH_PORT", str(HEALTH_PORT))
    if not text.isdecimal() or int(text) > 65_535:
        raise UsageError(f"CIUIC_HEALTH_PORT must be a port, got {text}")
    return int(text)


def _needed(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise UsageError(f"{name} is not set: the manifests of etc/kubernetes/chart set it")
    return value


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
