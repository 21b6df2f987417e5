"""``ciuic-operator``: the controller of a cluster; ``agent``: the agent of a node; ``configure``: copy its configuration (docs/kubernetes.md).

Environment of the controller: POD_NAMESPACE, POD_NAME, CIUIC_IMAGE, CIUIC_IMAGE_PULL_POLICY. Of the agent: NODE_NAME. Of both: CIUIC_HEALTH_PORT
(9848; 0: any that is free), at which they answer probes.

Exit codes: 0 after SIGTERM, 2 for a wrong environment, 5 where the API cannot be reached, 75 when the lease of the leader was lost, after which
the pod's restart competes for it anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from ciuic.errors import CiuicError, UsageError, pip_install

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
    from ciuic.operator.health import alive, serving_health
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
    from ciuic.operator.health import Check, alive, serving_health
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
