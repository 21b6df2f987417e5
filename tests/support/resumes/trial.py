"""Trial of one case: an undisturbed run, a run that is killed again and again, and their comparison.

    PYTHONPATH=tests python -m support.resumes.trial CASE DIRECTORY SEED KILLS RESULT

Processes are forked from this one after the imports, which take longer than the trainings. RESULT gets the
`Trial` as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from support.resumes.child import COPY_PARTS, SharedProgress, run_child
from support.resumes.judge import compare, compare_lives

_LONGEST_LIFE_SECONDS: Final = 180.0
_LONGEST_ORPHAN_SECONDS: Final = 150.0
"""More than the two minutes that a manager waits for its last snapshot when it is closed."""
_MAX_STEPS_TO_SAVE: Final = 8
"""Steps after which a process is killed that should be killed in a save and has not begun one."""
_STACK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.0005
_DEEPSPEED_TAG: Final = "global_step"
_PR_SET_CHILD_SUBREAPER: Final = 36


class Kill(NamedTuple):
    """When and whom to kill."""

    kind: str
    """``anywhere``: within a step; ``copying``: within a copy of the state; ``writing``: after such a copy."""
    step: int
    """First step at which the kill may come."""
    part: float
    """Share of the step, the copy or the writing that has passed."""
    victims: tuple[int, ...]
    """Ranks."""
    kills_writer: bool
    waits_for_writer: bool
    """Whether the next process begins when the writer has ended, or at once."""


class Life(NamedTuple):
    """What came of one process, or of one for each rank."""

    statuses: list[int]
    resumed_step: int | None
    was_killed: bool
    in_save: str
    """``copying`` or ``writing`` if a snapshot was not complete when the kill came; empty otherwise."""
    problem: str = ""


class Trial(NamedTuple):
    """Row of the table."""

    case: str
    kills: int
    kills_copying: int
    kills_writing: int
    resumed_steps: list[int | None]
    steps: int
    states: tuple[str, ...]
    values: tuple[str, ...]
    by_design: tuple[str, ...]
    problems: tuple[str, ...]


class CaseRunner:
    """Processes of one case."""

    def __init__(self, case: str, top: Path, choose: random.Random) -> None:
        self._case, self._top, self._choose = case, top, choose
        # A case with another number of ranks than its own is CASE@RANKS, a variant of it CASE-VARIANT.
        name, _, ranks = case.partition("@")
        name, _, self._variant = name.partition("-")
        module = importlib.import_module(f"support.resumes.cases.{name}")
        self._module = name
        self._worlds: tuple[int, ...] = getattr(module, "WORLDS", (int(ranks or module.WORLD),))
        self.world = self._worlds[0]
        """Number of ranks of the life."""
        self._by_design: dict[str, str] = module.BY_DESIGN
        for name in module.MODULES.split():
            importlib.import_module(name)
        importlib.import_module("ciuic.training.manager")
        self._progress = [SharedProgress() for _ in range(max(self._worlds))]
        # Keeps the imported objects out of every process's garbage collection.
        gc.freeze()

    def run(self, kills: int) -> Trial:
        """Run the case twice and compare; raise AssertionError if a run did not end."""
        undisturbed, killed = self._top / "undisturbed", self._top / "killed"
        undisturbed.mkdir()
        killed.mkdir()
        began = time.monotonic()
        life = self._live(undisturbed, None, 0.0)
        assert not any(life.statuses), _output(undisturbed, self.world)
        steps = self._progress[0].step
        lives = []
        for number, kill in enumerate([*self._plan(kills, steps), None]):
            self.world = self._worlds[number % len(self._worlds)]
            lives.append(self._live(killed, kill, (time.monotonic() - began) / steps))
        assert not any(lives[-1].statuses), _output(killed, self.world)
        self._wait_for_writers()
        if len(self._worlds) > 1:
            found = compare_lives(killed)
        else:
            found = compare(undisturbed, killed, self.world, self._by_design)
        return Trial(
            self._case,
            sum(life.was_killed for life in lives),
            sum(life.in_save == "copying" for life in lives),
            sum(life.in_save == "writing" for life in lives),
            [life.resumed_step for life in lives[1:]],
            steps,
            *found,
            tuple(life.problem for life in lives if life.problem),
        )

    def _plan(self, kills: int, steps: int) -> list[Kill]:
        """Return the kills in the order of their steps, so that each process has something left to do."""
        choose = self._choose
        # Half of them anywhere, the others while a snapshot is being made.
        kinds = [("anywhere", "copying", "anywhere", "writing")[number % 4] for number in range(kills)]
        choose.shuffle(kinds)
        # No kill in the last steps: a snapshot must follow in which it can be, and a step after that.
        targets = sorted(choose.randrange(max(1, steps - _MAX_STEPS_TO_SAVE - 4)) for _ in range(kills))
        plan = []
        for number, (kind, step) in enumerate(zip(kinds, targets, strict=True)):
            everyone = tuple(range(self._worlds[number % len(self._worlds)]))
            sets = [*((rank,) for rank in everyone), everyone]
            plan.append(
                Kill(
                    kind,
                    max(1, step) if kind != "anywhere" else step,
                    choose.random(),
                    # Of what the ranks have alike rank 0 alone makes the snapshot.
                    choose.choice(sets if kind == "anywhere" else [(0,), everyone, choose.choice(sets)]),
                    choose.random() < 0.5,
                    choose.random() < 0.5,
                )
            )
        return plan

    def _live(self, where: Path, kill: Kill | None, step_seconds: float) -> Life:
        """Start the case; kill it as planned, or wait for its end."""
        listed = _listed(where)
        for progress in self._progress:
            progress.clear()
        if kill is not None and kill.kind == "copying":
            for rank in kill.victims:
                self._progress[rank].copy_kill_part = int(kill.part * COPY_PARTS)
                self._progress[rank].copy_kill_step = kill.step
        children = self._begin(where)
        statuses: dict[int, int] = {}
        until = time.monotonic() + _LONGEST_LIFE_SECONDS
        committed: list[str] = []
        is_due = kill is not None
        while len(statuses) < self.world and time.monotonic() < until:
            if is_due and kill is not None and self._struck(kill, children, statuses, step_seconds):
                is_due = False
                committed = _listed(where)
                until = min(until, time.monotonic() + _LONGEST_ORPHAN_SECONDS)
            _reap(children, statuses)
            time.sleep(_POLL_SECONDS)
        # Of a kill in a copy, which the process does itself, the listing is not needed.
        problem = "" if len(statuses) == self.world else self._stuck(where, kill, children, statuses)
        for rank, child in enumerate(children):
            if rank not in statuses:
                os.kill(child, signal.SIGKILL)
                statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        was_killed = -signal.SIGKILL in statuses.values() and not problem
        if not was_killed and any(statuses.values()):
            problem = problem or f"failed by itself: {_output(where, self.world)[-3000:]}"
        in_save = self._in_save(where, kill, listed, committed) if was_killed and kill else ""
        if kill is not None and kill.waits_for_writer:
            self._wait_for_writers()
        resumed = self._progress[0].resumed
        return Life(
            [statuses[rank] for rank in range(self.world)],
            resumed - 1 if resumed else None,
            was_killed,
            in_save,
            problem,
        )

    def _begin(self, where: Path) -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        sys.stdout.flush()
        children = []
        for rank, progress in enumerate(self._progress[: self.world]):
            child = os.fork()
            if not child:
                run_child(self._module, self._variant, where, (rank, self.world, port), progress)
            children.append(child)
        return children

    def _struck(self, kill: Kill, children: list[int], statuses: dict[int, int], step_seconds: float) -> bool:
        """Kill if the time has come; return whether it has."""
        first = self._progress[kill.victims[0]]
        if kill.kind == "copying" and any(rank in statuses for rank in kill.victims):
            # The process has killed itself in the middle of the copy.
            return True
        # Where saves are skipped because the writer is slow, none may come before the end.
        is_late = first.step >= kill.step + _MAX_STEPS_TO_SAVE
        if kill.kind == "anywhere" or is_late:
            if first.step < kill.step:
                return False
            time.sleep(kill.part * step_seconds)
        elif kill.kind == "copying":
            return False
        else:
            if not first.staged or first.staged < first.staging or first.staged_step < kill.step:
                return False
            time.sleep(kill.part * (first.write_microseconds or 20_000) / 1e6)
        for rank in kill.victims:
            if rank not in statuses:
                os.kill(children[rank], signal.SIGKILL)
        if kill.kills_writer:
            for rank in kill.victims:
                _kill_writer(self._progress[rank].writer)
        return True

    def _in_save(self, where: Path, kill: Kill, listed: list[str], committed: list[str]) -> str:
        """Return the stage of the snapshot that was not complete when the kill came."""
        first = self._progress[kill.victims[0]]
        if first.staging > first.staged:
            return "copying"
        new = set(committed) - set(listed)
        if not first.staged:
            return ""
        self._wait_for_writers()
        steps = _steps(where)
        # A snapshot that was removed since cannot be asked for its step: it counts as complete.
        is_complete = any(steps.get(id_, first.staged_step) == first.staged_step for id_ in new)
        return "" if is_complete else "writing"

    def _stuck(self, where: Path, kill: Kill | None, children: list[int], statuses: dict[int, int]) -> str:
        """Return where the ranks are that do not end."""
        left = [rank for rank in range(self.world) if rank not in statuses]
        for rank in left:
            os.kill(children[rank], signal.SIGUSR2)
        time.sleep(_STACK_SECONDS)
        return f"ranks {left} still ran after {kill}:\n{_output(where, self.world)[-3000:]}"

    def _wait_for_writers(self) -> None:
        """Reap the writers of killed processes, which this process has adopted."""
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _reap(children: list[int], statuses: dict[int, int]) -> None:
    for rank, child in enumerate(children):
        if rank not in statuses:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[rank] = os.waitstatus_to_exitcode(status)


def _kill_writer(pid: int) -> None:
    """Kill a writer; it is a child or grandchild of this process that nobody else has reaped."""
    if not pid:
        return
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return
    if b"writer_process" in command:
        os.kill(pid, signal.SIGKILL)


def _listed(where: Path) -> list[str]:
    """Return the names of the snapshots that exist at this instant."""
    try:
        return os.listdir(where / "snapshots" / "snapshots")
    except FileNotFoundError:
        return []


def _steps(where: Path) -> dict[str, int | None]:
    from ciuic.training.snapshots import TrainingSnapshots

    found = TrainingSnapshots(where / "snapshots", "training").list_snapshots()
    steps = {one.id: one.facts.step for one in found}
    for one in found:
        for tag in one.tags:
            # Of DeepSpeed's checkpoints a tag tells the step.
            if tag.startswith(_DEEPSPEED_TAG):
                steps[one.id] = int(tag[len(_DEEPSPEED_TAG) :])
    return steps


def _output(where: Path, world: int) -> str:
    return "\n".join((where / f"output-{rank}").read_text() for rank in range(world))


def main(case: str, top: str, seed: str, kills: str, result: str) -> int:
    # Writers of killed processes become children of this one.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    runner = CaseRunner(case, Path(top), random.Random(f"{seed} {case}"))
    Path(result).write_text(json.dumps(runner.run(int(kills))._asdict()))
    # Threads of the frameworks, which were never used here, must not delay the end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
