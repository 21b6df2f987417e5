"""Reload: take up a changed configuration, for SIGHUP and for POST /v1/reload.

Guarantees: a configuration that is not valid changes nothing; a root that is gone from it is unmounted before
the call returns. `apply_configuration` waits for no mount, so that a signal after SIGHUP is not delayed by a
root that hangs; `await_mounted` does.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import structlog
import trio

from ciuic.daemon.base.settings import Settings
from ciuic.daemon.parts import DaemonParts
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.protocol.control_types import MountState, ReloadReport, RootChange

# Settings that change at a restart only, because workers and commands find the daemon by them, and their
# configuration keys.
_AT_RESTART: Final = {"socket": "control.socket", "runtime_dir": "daemon.runtime_dir"}
log = structlog.get_logger(__name__)


class AppliedConfiguration(NamedTuple):
    """Outcome of a reload; the roots in `started` may not be mounted yet."""

    report: ReloadReport
    started: list[RootSupervisor]


async def apply_configuration(parts: DaemonParts) -> AppliedConfiguration:
    """Read the configuration again and apply it.

    Raises:
        ConfigError: the configuration is not valid; nothing was changed.
        Unreachable: the daemon is stopping.
    """
    parts.refuse_when_stopping()
    before = parts.settings
    wanted = await trio.to_thread.run_sync(parts.active.read)
    parts.take_over(wanted)
    report = ReloadReport(config_path=wanted.config_path, at_restart=_at_restart(before, wanted))
    # A list of its own: `remove` changes the dictionary.
    for path in [path for path in parts.roots.supervisors if parts.settings.root(path) is None]:
        await parts.roots.remove(path)
        state: MountState = "stopping" if path in parts.roots.departing else "unmounted"
        report.changes.append(RootChange(path=path, change="removed", state=state))
    known = set(parts.roots.supervisors)
    supervisors = [parts.roots.change_or_start(root) for root in parts.settings.roots]
    for supervisor in supervisors:
        if supervisor.path not in known:
            parts.first_snapshots.wanted(supervisor.path)
    # After the roots: the first one decides where the repository is, and mounted ones know where it was.
    await parts.roots.prepare_store()
    if before.interval_seconds != parts.settings.interval_seconds:
        parts.schedule.change_interval(parts.settings.interval_seconds)
    parts.priorities.wake()  # the running capture goes on under the new deadline and share
    # At once, because the next regular look-up may be a minute away.
    await parts.accounts.refresh()
    log.info("configuration_reloaded", file=parts.settings.config_path)
    return AppliedConfiguration(
        report, [supervisor for supervisor in supervisors if supervisor.path not in known]
    )


async def await_mounted(applied: AppliedConfiguration) -> ReloadReport:
    """Wait until every added root is mounted or its first attempt has failed, and report how each ended."""
    report, started = applied
    for supervisor in started:
        await supervisor.settled()
        await supervisor.not_in_transition()
        report.changes.append(
            RootChange(
                path=supervisor.path, change="added", state=supervisor.state, error=supervisor.error or ""
            )
        )
    return report


def _at_restart(before: Settings, wanted: Settings) -> list[str]:
    return [key for field, key in _AT_RESTART.items() if getattr(before, field) != getattr(wanted, field)]
