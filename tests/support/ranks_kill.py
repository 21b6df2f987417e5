"""Distributed trainings that are killed and restarted."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import leftovers
from support.rank_processes import Ranks
from support.until import until

from ciuic.repository import Repository
from ciuic.training.writer.housekeeping import read_back

WORLD = 2
_STEP_SECONDS = 0.03


class Trial:
    """Trial of ``main(rank, world, save_dir, result, step_seconds)``, which resumes by itself.

    Each rank writes RESULT-RANK as JSON.
    """

    def __init__(
        self, place: Path, main: Callable[..., None], choose: random.Random, *, longest_seconds: float
    ) -> None:
        self._place, self._main, self._choose = place, main, choose
        self._longest_seconds = longest_seconds
        self._number = 0

    def uninterrupted(self) -> list[dict[str, Any]]:
        """Return the results of an undisturbed run, by rank."""
        return self._result("whole", 0.0)

    def killed(self, victims: tuple[int, ...]) -> None:
        """Start the run and kill these ranks at some instant.

        The others end by themselves: their partner is gone.
        """
        ranks = self._begin("killed", _STEP_SECONDS)
        time.sleep(self._choose.uniform(0.2, self._longest_seconds))
        ranks.kill(*victims)
        ranks.wait()
        self.wait_for_writers()

    def finished(self) -> list[dict[str, Any]]:
        """Run the killed training to its end; return its results."""
        return self._result("killed", 0.0)

    def wait_for_writers(self) -> None:
        """Return when the snapshots handed over by killed ranks are stored, and their writers have ended."""
        until("end of the writers", lambda: not _writers())
        for save_dir in self._directories():
            with Repository.open(save_dir) as repository:
                repository.writer(wait_seconds=60).close()

    def read_back(self) -> tuple[int, list[str]]:
        """Return how many snapshots of the killed run are whole, and the faults of the others."""
        reasons = {}
        for save_dir in self._directories():
            with Repository.open(save_dir) as repository:
                reasons |= {id_: read_back(repository, id_) for id_ in repository.snapshots.ids()}
        problems = [f"{id_}: {reason}" for id_, reason in reasons.items() if reason]
        return len(reasons) - len(problems), problems

    def _directories(self) -> list[Path]:
        """Return the repositories of the killed run: one, or one of each rank."""
        save_dir = self._place / "killed" / "snapshots"
        return [
            one
            for one in (save_dir, *(save_dir / str(rank) for rank in range(WORLD)))
            if Repository.exists(one)
        ]

    def _result(self, which: str, step_seconds: float) -> list[dict[str, Any]]:
        self._begin(which, step_seconds).check()
        results = [self._place / which / f"result-{rank}" for rank in range(WORLD)]
        return [json.loads(result.read_text()) for result in results]

    def _begin(self, which: str, step_seconds: float) -> Ranks:
        self._number += 1
        where = self._place / which
        where.mkdir(exist_ok=True)
        save_dir, result = str(where / "snapshots"), str(where / "result")
        logs = self._place / f"logs-{self._number}"
        return Ranks(logs, WORLD, self._main, save_dir, result, step_seconds, timeout_seconds=10)


def _writers() -> list[str]:
    """Return the writers of killed ranks, which this process adopts (conftest.py)."""
    return [command for command in leftovers.living_children().values() if "writer_process" in command]
