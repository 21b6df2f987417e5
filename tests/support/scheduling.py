"""Scheduler of parallel test runs: one file to one worker, each test once, also after a worker crash."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FilesOnce(LoadFileScheduling):
    """`--dist loadfile` that comes to its end when a process dies.

    A process holds its last test back until it is told what comes next, or that nothing does. pytest-xdist 3.8 tells neither to the
    successor of one that died if it hands it a single test, or a file that is done. And it hands it the deadly test again.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which a process died, and leave to others what else it was to run."""
        units = self.assigned_work[node]
        left = [name for unit in units.values() for name, is_over in unit.items() if not is_over]
        self.assigned_work[node] = {
            scope: rest
            for scope, unit in units.items()
            if (rest := {name: False for name in unit if name in left[1:]})
        }
        super().remove_node(node)
        return left[0] if left else None

    def _reschedule(self, node: WorkerController) -> None:
        # One that has not collected its tests yet asks when it has.
        if node in self.registered_collections:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.workqueue:
            super()._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
        elif self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
