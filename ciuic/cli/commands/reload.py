"""``ciuic reload``: has the running daemon read its configuration again, and reports what that changed.

Guarantees: on return every added root is mounted or named as failed (exit 8), every removed one unmounted; a
configuration that is not valid changes nothing and ends with the daemon's own message (exit 2). Works with and without
systemd: the daemon is asked over its control socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.overlay_fate import overlay_fate
from ciuic.cli.shared.session import current
from ciuic.errors import Partial

if TYPE_CHECKING:
    from ciuic.protocol.control_types import ReloadReport


@click.command("reload", cls=FrameCommand)
@json_option
def command(as_json: bool) -> None:
    """Have the running daemon read its configuration again; wait for it, and report what changed.

    A configuration that is not valid changes nothing (exit 2).
    """
    from ciuic.system import service_manager

    report = current().control.reload()
    failed = [change for change in report.changes if change.change == "added" and change.state != "mounted"]
    if as_json:
        import msgspec

        out_json(msgspec.to_builtins(report))
    else:
        _print(report)
    if report.at_restart:
        warn(
            f"{', '.join(report.at_restart)}: in force from the next start of the daemon on",
            hint=service_manager.restart_hint(),
        )
    if failed:
        reasons = "; ".join(f"{shown_text(change.path)}: {shown_text(change.error)}" for change in failed)
        raise Partial(
            f"the configuration is in force, but not everything is mounted: {reasons}",
            hint="the daemon keeps trying; ciuic status shows how it goes",
        )


def _print(report: ReloadReport) -> None:
    out(f"{shown_text(report.config_path) or 'the configuration'} is in force")
    for change in report.changes:
        if change.change == "removed":
            out(f"{shown_text(change.path)} is no longer protected; {overlay_fate(change.path)}")
        elif change.state == "mounted":
            out(f"{shown_text(change.path)} is protected, mounted")
