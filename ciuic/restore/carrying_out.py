"""Carrying out a restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ciuic.restore.limits import many_descriptors
from ciuic.restore.model import Item, Plan, Progress, Result
from ciuic.restore.run import Run


def execute(
    plan: Plan,
    *,
    progress: Callable[[Progress], None] | None = None,
    report: Callable[[Item], None] | None = None,
    dry_run: bool = False,
    runtime_dir: Path | None = None,
) -> Result:
    """Does what the plan says; on return everything counted as restored is durable under its final name.

    Both callbacks come from several threads, one at a time. What fails for one path is in `Result.failed`, and the others
    go on; a full disk ends it early (`Result.stopped`). KeyboardInterrupt, or what a callback raises, comes out after the
    files in work are removed. Busy when another restore works in the same directory. CiuicError when the way to the
    destination is blocked. ``dry_run`` changes nothing and reports the same. ``runtime_dir``: where overlay workers listen (overlay.py); without
    it nothing is shared with files of an overlay.
    """
    with many_descriptors():
        return Run(plan, progress, report, dry_run, runtime_dir).execute()
