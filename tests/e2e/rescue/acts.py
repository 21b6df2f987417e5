"""Parts that the rescue stories share: the job, the commands, the ends of two runs.

A story runs as root with the installed commands, in a directory of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import numpy as np
from support.live import CommandFailed, Live

STEPS = int(os.environ.get("CIUIC_RESCUE_STEPS", "700"))
"""Steps of the training run: about ten seconds' worth."""
SEED = 20260
KILL_AFTER_STEP = STEPS // 2
SNAPSHOTS_WANTED = 2
CHECKPOINT_BYTES = 10 * 2**20
"""Size that a snapshot has from its first checkpoint on; one of the empty start is smaller."""
INTERVAL = os.environ.get("CIUIC_RESCUE_INTERVAL", "2s")
STALL_SECONDS = float(os.environ.get("CIUIC_RESCUE_STALL", "180"))
"""Time without any progress after which a story fails."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)
# The hosts of a story count from its beginning, as it does.
_begun = float(os.environ.setdefault("CIUIC_RESCUE_BEGUN", str(time.monotonic())))


class StoryFailed(Exception):
    """Raised when the story's outcome is not what ciuic promises."""


def narrate(text: str) -> None:
    """Print one line of narration, with the seconds since the start."""
    print(f"[{time.monotonic() - _begun:6.1f} s] {text}", flush=True)


def _die_with_parent() -> None:
    """Ask the kernel to end this child if the story itself is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Training:
    """The training job as a process of its own, and its output."""

    def __init__(self, training: Path, state: Path, seed: int = SEED, *, resume: bool = False) -> None:
        command = [sys.executable, str(HERE / "train.py"), str(training), str(state), "--steps", str(STEPS)]
        command += ["--seed", str(seed)]
        self.process = subprocess.Popen(
            command + (["--resume"] if resume else []),
            cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent,
        )  # fmt: skip

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield (word, value) of each line until the job ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, value = line.strip().partition(" ")
            yield word, value

    def finish(self) -> None:
        """Wait for the job's end, which must be a success."""
        for _ in self.lines():
            pass
        if self.process.wait() != 0:
            raise StoryFailed(f"the training job failed with {self.process.returncode}")

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()


class Acts:
    """Stage with two directories that a job writes to, and the acts that every story has."""

    def __init__(self, work: Path, live: Live, seed: int = SEED) -> None:
        self.live = live
        self.seed = seed
        self.training, self.state = work / "training", work / "state"
        self.jobs: list[Training] = []

    def command(self, *arguments: str, show: int = 0, expect: int | None = 0) -> str:
        """Run an installed command, print it, and print the first lines of its answer."""
        begun = time.monotonic()
        done = self.live.run(*arguments, expect=expect)
        narrate(f"$ ciuic {' '.join(arguments)}   ({time.monotonic() - begun:.2f} s)")
        text = done.stdout.decode()
        lines = text.splitlines()
        for line in lines[:show]:
            print(f"             {line}")
        if show and len(lines) > show:
            print(f"             … {len(lines) - show} more")
        return text

    def job(self, training: Path, state: Path, *, resume: bool = False) -> Training:
        """Start a training job that ends with the story."""
        job = Training(training, state, self.seed, resume=resume)
        self.jobs.append(job)
        return job

    def compare_restored(self) -> None:
        """Check that every restored finished checkpoint is one that the job had saved under that name."""
        names = sorted(path.name for path in (self.training / "checkpoints").glob("step-*.npz"))
        if not names:
            raise StoryFailed("no checkpoint came back")
        for name in names:
            step = int(name[5:11])
            # Each member has a checksum, which reading compares.
            with np.load(self.training / "checkpoints" / name, allow_pickle=False) as archive:
                found = {member: archive[member] for member in archive.files}
            if found["step"] != step:
                raise StoryFailed(f"{name} came back, and is not what was saved at step {step}")
        narrate(f"{len(names)} checkpoints came back, the newest is {names[-1]}")

    def resume(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Resume the job from the newest whole checkpoint, to the end; ``meanwhile`` is called when it trains."""
        job = self.job(self.training, self.state, resume=True)
        for word, value in job.lines():
            if word == "damaged":
                raise StoryFailed(f"the job found {value} damaged after the restore")
            if word == "resumed":
                narrate(f"resumed at step {value}; the job computes on to step {STEPS}")
                if int(value) == 0:
                    raise StoryFailed("the job began again instead of resuming")
                meanwhile()
        if job.process.wait() != 0:
            raise StoryFailed("the resumed job failed")

    def end(self) -> None:
        """End every job of the story."""
        for job in self.jobs:
            if job.process.poll() is None:
                job.kill()


def outcome(training: Path, state: Path) -> dict[str, str]:
    """Return the digests of what a finished job leaves: final checkpoint, log, configuration and state."""
    paths = {
        "the final checkpoint": training / f"checkpoints/step-{STEPS:06d}.npz",
        "the log": training / "logs/train.log",
        "the configuration": training / "config/run.json",
        "the state": state / "run/state.json",
    }
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}


def require_same(found: dict[str, str], expected: dict[str, str]) -> None:
    """Check that two runs have the same bytes at their ends."""
    for name, digest in expected.items():
        if found[name] != digest:
            raise StoryFailed(f"{name} differs from the undisturbed run's")
    narrate("bit for bit the undisturbed run: parameters, both Adam moments, generator, log, config, state")


def _on_signal(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def wait_while_progressing(what: str, condition: Callable[[], bool], progress: Callable[[], object]) -> None:
    """Return when the condition holds; fail when ``progress`` has long returned the same."""
    shown, since = progress(), time.monotonic()
    while not condition():
        if (now := progress()) != shown:
            shown, since = now, time.monotonic()
        elif time.monotonic() - since > STALL_SECONDS:
            raise StoryFailed(f"waiting for {what}, nothing has progressed for {STALL_SECONDS:.0f} s")
        time.sleep(0.1)


def tell(
    name: str, play: Callable[[], None], report_cause: Callable[[str], object] = lambda cause: None
) -> int:
    """Play a story; return the exit status of the program that tells it.

    The last line says in a sentence why a story failed; ``report_cause`` is called with it.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    try:
        play()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (StoryFailed, CommandFailed, TimeoutError) as exc:
        cause, _, details = str(exc).partition("\n")
        print(details, file=sys.stderr)
        print(f"{name}: FAILED: {cause}", file=sys.stderr, flush=True)
        report_cause(cause)
        return 1
    return 0


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Finish what cleans up, also when signals come: a second Ctrl-C must not stop it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
