"""Taking up a changed configuration, for SIGHUP and for POST /v1/reload.

Guarantees: a configuration that is not valid changes nothing; a root that is gone from it is unmounted before the call
returns. `take_up` waits for no mount, so that a signal after SIGHUP is not kept waiting by a root that hangs; `mounted`
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from ciuic.control_types import ReloadReport, RootChange
from ciuic.daemon.settings import Settings

if TYPE_CHECKING:
    from ciuic.daemon.service import Daemon
    from ciuic.daemon.supervisor import RootSupervisor

_AT_RESTART: Final = {"socket": "control.socket", "runtime_dir": "daemon.runtime_dir"}
"""Settings that workers and commands know the running daemon by, and the keys that set them."""
log = structlog.get_logger(__name__)


class TakenUp(NamedTuple):
    """What a reload did; ``started`` may not be mounted yet."""

    report: ReloadReport
    started: list[RootSupervisor]


async def take_up(daemon: Daemon) -> TakenUp:
    """Read the configuration again and bring the daemon to it; ConfigError and no change when it is not valid."""
    daemon.refuse_when_stopping()
    before = daemon.settings
    wanted = await trio.to_thread.run_sync(daemon.read_settings)
    daemon.take_over(wanted)
    report = ReloadReport(config_path=wanted.config_path, at_restart=_at_restart(before, wanted))
    for path in [path for path in daemon.roots.supervisors if daemon.settings.root(path) is None]:
        await daemon.roots.remove(path)
        report.changes.append(RootChange(path=path, change="removed", state="unmounted"))
    known = set(daemon.roots.supervisors)
    supervisors = [daemon.roots.change_or_start(root) for root in daemon.settings.roots]
    for supervisor in supervisors:
        if supervisor.path not in known:
            daemon.first_snapshots.wanted(supervisor.path)
    await daemon.prepare_store()
    if before.interval_seconds != daemon.settings.interval_seconds:
        daemon.schedule.change_interval(daemon.settings.interval_seconds)
    daemon.urging.wake()  # the capture that runs goes on under the new terms
    await daemon.accounts.refresh()
    log.info("configuration_reloaded", file=daemon.settings.config_path)
    return TakenUp(report, [supervisor for supervisor in supervisors if supervisor.path not in known])


async def mounted(taken_up: TakenUp) -> ReloadReport:
    """Wait until every added root is mounted or its first attempt has failed, and report how each ended."""
    report, started = taken_up
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
