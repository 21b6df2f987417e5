"""Carrying out a restore."""

from __future__ import annotations

from collections.abc import Callable

from ciuic.restore.model import Item, Plan, Progress, Result


def execute(
    plan: Plan,
    *,
    progress: Callable[[Progress], None] | None = None,
    report: Callable[[Item], None] | None = None,
    dry_run: bool = False,
) -> Result:
    """Does what the plan says; on return everything counted as restored is durable under its final name.

    Both callbacks come from several threads, one at a time. What fails for one path is in `Result.failed`, and the others go
    on; a full disk ends it early (`Result.stopped`). KeyboardInterrupt, or what a callback raises, comes out after the files
    in work are removed. Busy when the same restore is running already. ``dry_run`` changes nothing and reports the same.
    """
    raise NotImplementedError
