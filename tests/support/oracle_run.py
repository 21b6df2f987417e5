"""Four writers under an overlay, cuts at random instants, and each captured snapshot judged by the oracle."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support.capture_child import Found, captured
from support.oracle import Oracle, share_an_instant
from support.overlay import Overlay
from support.until import until

WRITERS = 4


class Outcome:
    """Number of judged snapshots, and the errors."""

    def __init__(self) -> None:
        self.snapshots = self.files = self.not_held = 0
        self.wrong: list[str] = []


def run(
    overlay: Overlay, store: Path, logs: Path, *, seed: int, cuts: int, until: float | None = None
) -> Outcome:
    """Take ``cuts`` snapshots while the writers work, none after ``until`` (monotonic seconds).

    ``logs`` is outside the root.
    """
    outcome, rng = Outcome(), random.Random(seed)
    names = [f"w{number}" for number in range(WRITERS)]
    oracles = {name: Oracle(seed + index, logs / name) for index, name in enumerate(names)}
    with _writing(overlay.root, logs, names, seed):
        for _ in range(cuts):
            if until is not None and time.monotonic() > until:
                break
            time.sleep(rng.random() * 0.2)
            requested_ns = time.monotonic_ns()
            cut = overlay.client.cut()
            answered = time.monotonic_ns()
            files = captured(overlay, store, cut.epoch, cut.cut_ns)
            outcome.snapshots += 1
            moments = []
            for name, oracle in oracles.items():
                view = _below(files, name)
                outcome.files += len(view)
                outcome.not_held += sum(not found.held for found in view.values())
                moment = oracle.judge(view, requested_ns, answered)
                moments.append(moment)
                if not moment.spans:
                    outcome.wrong.append(f"cut {cut.epoch}, {name}: {moment.why}")
            if all(moment.spans for moment in moments) and not share_an_instant(moments):
                outcome.wrong.append(f"cut {cut.epoch}: no instant of all writers")
    return outcome


def _below(files: dict[bytes, Found], folder: str) -> dict[str, Found]:
    head = f"{folder}/".encode()
    return {path[len(head) :].decode(): found for path, found in files.items() if path.startswith(head)}


@contextlib.contextmanager
def _writing(root: Path, logs: Path, names: list[str], seed: int) -> Iterator[None]:
    writers = []
    for index, name in enumerate(names):
        (root / name).mkdir()
        command = [sys.executable, "-m", "support.oracle", str(root / name), str(logs / name)]
        writers.append(
            subprocess.Popen(
                [*command, str(seed + index)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        until(
            "every writer's first steps",
            lambda: all((logs / name).exists() and (logs / name).stat().st_size > 1000 for name in names),
        )
        yield
    finally:
        errors = [writer.communicate(timeout=60)[1].decode() for writer in writers]
    assert all(writer.returncode == 0 for writer in writers), errors
