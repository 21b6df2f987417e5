"""Alerts about one root and its worker."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ciuic
from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.base.child_processes import describe_exit
from ciuic.system import service_manager
from ciuic.units import plural


class RootAlerts:
    """Report and clear the alerts of one root. Belongs to the trio thread."""

    def __init__(self, alerts: Alerts, path: str) -> None:
        self._alerts = alerts
        self._path = path

    def not_mounted(self, error: str, hint: str) -> None:
        """Report that the root has no overlay."""
        self._alerts.report(
            f"root:{self._path}",
            f"{self._path} is not protected: {error}",
            hint=hint or "the daemon keeps trying",
            root=self._path,
        )

    def not_unmounted(self, error: str, hint: str) -> None:
        """Report that the overlay is still over the root although it should not be."""
        self._alerts.report(
            f"root:{self._path}",
            f"the overlay of {self._path} could not be unmounted: {error or 'its worker does not stop'}",
            hint=hint or f"look at its log; as a last resort: umount -l {self._path}",
            root=self._path,
        )

    def clear_mount(self) -> None:
        """Clear what `not_mounted` and `not_unmounted` reported."""
        self._alerts.clear(f"root:{self._path}")

    def clear_silent(self) -> None:
        """Clear the alert about a worker that does not answer: it has ended."""
        self._alerts.clear(f"silent:{self._path}")

    def worker_died(self, status: int | None, *, has_session: bool) -> None:
        """Report that the worker died.

        Args:
            status: exit status, negative for a signal; None when it is not known.
            has_session: a successor can go on with the session, so that files stay open.
        """
        noticed = (
            "a successor goes on with its session, and files stay open"
            if has_session
            else "files that were open through it answer ENOTCONN"
        )
        self._alerts.report(
            f"worker:{self._path}",
            f"the overlay worker of {self._path} died ({describe_exit(status)}) and was started again",
            hint=f"{noticed}; see the worker's last lines in the log",
            root=self._path,
            severity="warning",
        )

    def unmounted_by_others(self, *, lingers: bool) -> None:
        """Report that another process unmounted the overlay.

        Args:
            lingers: the worker goes on serving files that are open in the overlay.
        """
        files = (
            "files that were open in it go on being served, and what is written to them is not tracked"
            if lingers
            else "no file was open in it"
        )
        self._alerts.report(
            f"unmounted:{self._path}",
            f"the overlay of {self._path} was taken off by somebody else (umount, or a signal to its worker) and is "
            f"mounted again; {files}",
            hint="the next snapshot compares the whole tree; to take an overlay away: ciuic unprotect PATH",
            root=self._path,
            severity="warning",
        )

    def plain(self, plain: bool, deaths: int) -> None:
        """Report that the root is served without tracking after `deaths` deaths in a row, or clear that."""
        if not plain:
            self._alerts.clear(f"plain:{self._path}")
            return
        self._alerts.report(
            f"plain:{self._path}",
            f"{self._path} is served without snapshots: its overlay worker died {plural(deaths, 'time')} in a row",
            hint="the job goes on, and the log has the workers' last lines; to try again, "
            + service_manager.restart_hint(),
            root=self._path,
        )

    def set_aside(self, names: Sequence[bytes]) -> None:
        """Report the new names of files that the root's owner had put where the worker keeps its state."""
        if not names:
            return
        shown = ", ".join(os.fsdecode(name) for name in names)
        self._alerts.report(
            f"reserved:{self._path}",
            f"{self._path} had a file of its owner under the reserved name {os.fsdecode(ciuic.STATE_DIR_NAME)}; "
            f"it was renamed to {shown}",
            hint="look at it; ciuic has not used it",
            root=self._path,
            severity="warning",
        )
