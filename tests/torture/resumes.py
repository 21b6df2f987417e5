"""Trainings under every integration, each killed ten times and started anew, and one table of what differs.

A loop with mixed precision and an average of the weights, Hugging Face, Accelerate, Lightning, Keras, Flax, DDP,
FSDP2 and tensor parallelism. Half of the kills come at a random instant of a random step, the others while the
state is copied or written; of several ranks one or all are killed, with or without the writer process. The final state is compared bit by bit with that of
an undisturbed run, and so is every value that any of the processes has reported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.resumes.cases import NEEDED
from support.resumes.trial import Trial
from torture.figure import Figure

_KILLS = 10
_MIN_KILLS_IN_SAVES = 3
_LIMIT_SECONDS = 600


def run(seconds: float, seed: int) -> list[Figure]:
    """Run each case until the time is over, once at least."""
    top = Path(tempfile.mkdtemp())
    until = time.monotonic() + seconds
    trials: list[Trial] = []
    figures = []
    for case, framework in NEEDED.items():
        if importlib.util.find_spec(framework) is None:
            figures.append(Figure(f"{case}: {framework} is not installed", 0))
    cases = [case for case, framework in NEEDED.items() if importlib.util.find_spec(framework) is not None]
    failures: dict[str, list[str]] = {case: [] for case in cases}
    rounds = 0
    _print_head()
    while not rounds or time.monotonic() < until:
        for case in cases:
            try:
                trial = _trial(case, top / f"{case}-{rounds}", seed + rounds)
            except AssertionError as error:
                failures[case].append(f"seed {seed + rounds} did not end: {error}")
                continue
            trials.append(trial)
            _print_trial(trial)
            failures[case] += [f"seed {seed + rounds}: {text}" for text in _broken(trial)]
        rounds += 1
    for case in cases:
        own = [trial for trial in trials if trial.case == case]
        in_saves = sum(trial.kills_copying + trial.kills_writing for trial in own)
        figures += [
            Figure(f"{case}: kills", sum(trial.kills for trial in own), tuple(failures[case])),
            Figure(f"{case}: kills while a snapshot was being made", in_saves),
        ]
    return figures


def _trial(case: str, where: Path, seed: int) -> Trial:
    """Run one case in a process of its own, which imports one framework."""
    where.mkdir()
    result = where / "result.json"
    command = [sys.executable, "-m", "support.resumes.trial", case, str(where), str(seed), str(_KILLS)]
    done = subprocess.run(
        [*command, str(result)],
        cwd=where,
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "KERAS_BACKEND": "tensorflow",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: Trial = Trial(**json.loads(result.read_text()))
    return found


def _broken(trial: Trial) -> list[str]:
    """Return what a trial shows that must not be."""
    found = [f"differs in state: {name}" for name in trial.states]
    found += [f"differs in what it reports: {name}" for name in trial.values]
    found += trial.problems
    if trial.kills < _KILLS:
        found.append(f"only {trial.kills} of {_KILLS} kills came before the end")
    if trial.kills_copying + trial.kills_writing < _MIN_KILLS_IN_SAVES:
        found.append("too few kills came while a snapshot was being made")
    return found


def _print_head() -> None:
    _print_row(
        "case", "kills", "while copied; while written", "resumed from step", "state", "reported values"
    )
    _print_row(*["---"] * 6)


def _print_trial(trial: Trial) -> None:
    """Print a row at once: a later case that does not end must not take it along."""
    steps = ", ".join("-" if step is None else str(step) for step in trial.resumed_steps)
    values = "differ: " + ", ".join(trial.values) if trial.values else "equal"
    _print_row(
        trial.case,
        str(trial.kills),
        f"{trial.kills_copying}; {trial.kills_writing}",
        f"{steps} of {trial.steps}",
        "differs: " + ", ".join(trial.states) if trial.states else "equal",
        values + (f"; by design: {', '.join(trial.by_design)}" if trial.by_design else ""),
    )


def _print_row(*cells: str) -> None:
    # Standard output belongs to the operator; the figures go into a file.
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()
