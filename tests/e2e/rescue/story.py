"""Rescue story with the installed commands: protect, train, kill, ruin, restore, resume, compare.

Run by `make rescue`, on directories of its own. Exits with 0 when the resumed run reached, bit for bit, the
state of an undisturbed run; with 1 and a reason otherwise. Cleans up in every case, also when interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import filecmp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from support import leftovers
from support.live import CommandFailed, Listed, Live

STEPS = int(os.environ.get("CIUIC_RESCUE_STEPS", "700"))
"""Steps of the training run: about ten seconds' worth."""
KILL_AFTER_STEP = STEPS // 2
SNAPSHOTS_WANTED = 2
INTERVAL = "2s"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)
_begun = time.monotonic()


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

    def __init__(self, training: Path, state: Path, *, resume: bool = False) -> None:
        command = [sys.executable, str(HERE / "train.py"), str(training), str(state), "--steps", str(STEPS)]
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


class Story:
    """The stage: a work directory with two roots, a reference run beside them, and a ciuic of its own."""

    def __init__(self, work: Path, live: Live) -> None:
        self.live = live
        self.training, self.state = work / "training", work / "state"
        self.plain_training, self.plain_state = work / "undisturbed/training", work / "undisturbed/state"
        for path in (self.training, self.state, self.plain_training, self.plain_state):
            path.mkdir(parents=True)
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
        job = Training(training, state, resume=resume)
        self.jobs.append(job)
        return job

    # -- the acts

    def play(self) -> None:
        """Play every act in turn."""
        narrate(
            f"the same {STEPS} steps are computed once undisturbed, in plain directories, to compare with at the end"
        )
        undisturbed = self.job(self.plain_training, self.plain_state)
        self.protect()
        killed_at = self.train_until_killed()
        self.ruin()
        chosen = self.choose_snapshot(killed_at)
        self.bring_back(chosen)
        undisturbed.finish()
        self.compare_restored()
        self.resume()
        self.compare_runs()

    def protect(self) -> None:
        """Protect both roots under a running daemon."""
        self.command("protect", str(self.training), str(self.state))
        self.live.start(self.training, self.state)
        narrate(f"the daemon runs; both roots are mounted in place; a snapshot every {INTERVAL} by itself")

    def train_until_killed(self) -> datetime:
        """Kill the job in the middle of a save, once snapshots hold checkpoints; return the time."""
        resume = False
        while True:
            job = self.job(self.training, self.state, resume=resume)
            narrate(f"the training job runs as process {job.process.pid} and writes through the mounts")
            step = self.kill_in_save(job)
            killed_at = datetime.now()  # noqa: DTZ005  local time, as the machine-readable list has it
            folder = self.training / "checkpoints"
            torn, final = folder / f".step-{step:06d}.ckpt.tmp", folder / f"step-{step:06d}.ckpt"
            if torn.exists() and not final.exists():
                break
            narrate(f"the kill came just after the save of step {step}; once more")
            resume = True
        narrate(
            f"SIGKILL in the middle of saving step {step}: {torn.name} has {torn.stat().st_size:,} bytes and stays torn"
        )
        return killed_at

    def kill_in_save(self, job: Training) -> int:
        """Return the step whose save was under way when SIGKILL was sent."""
        # Listing takes longer than a save: a thread lists, so that the kill follows the line at once.
        armed, end = threading.Event(), threading.Event()

        def look() -> None:
            while not end.wait(0.2):
                if self.snapshots_with_checkpoints():
                    armed.set()
                    return

        looking = threading.Thread(target=look)
        looking.start()
        try:
            for word, value in job.lines():
                if word == "half" and int(value) > KILL_AFTER_STEP and armed.is_set():
                    job.kill()
                    return int(value)
        finally:
            end.set()
            looking.join()
        raise StoryFailed(f"the job ended before there were {SNAPSHOTS_WANTED} snapshots with a checkpoint")

    def snapshots_with_checkpoints(self) -> bool:
        """Return whether enough automatic snapshots hold a checkpoint."""
        # A snapshot of the empty start is smaller than one checkpoint.
        smallest = 10 * 2**20
        return sum(row.size_bytes > smallest for row in self.live.list()) >= SNAPSHOTS_WANTED

    def ruin(self) -> None:
        """Corrupt the newest checkpoint, delete others and the configuration, and truncate the state."""
        checkpoints = sorted((self.training / "checkpoints").glob("step-*.ckpt"))
        with open(checkpoints[-1], "r+b") as file:
            file.seek(1_000_000)
            file.write(b"\xff" * 4096)
        for file_path in checkpoints[:-1]:
            file_path.unlink()
        shutil.rmtree(self.training / "config")
        os.truncate(self.state / "run/state.json", 3)
        narrate(
            f"ruin: {checkpoints[-1].name} corrupted, {len(checkpoints) - 1} checkpoints and config/ deleted, state.json cut"
        )

    def choose_snapshot(self, killed_at: datetime) -> Listed:
        """Return the newest snapshot from before the second of the kill, as lists have whole seconds."""
        self.command("list", "--machine-readable", show=4)
        limit = killed_at.replace(microsecond=0)
        chosen = next((row for row in self.live.list() if row.time < limit), None)
        if chosen is None:
            raise StoryFailed("there is no snapshot from before the kill")
        lost = killed_at - chosen.time
        narrate(
            f"the newest from before the kill is {chosen.id}, taken {max(lost, timedelta(0)).total_seconds():.0f} s earlier"
        )
        self.command("verify", chosen.id, "--checksum", show=3)
        return chosen

    def bring_back(self, chosen: Listed) -> None:
        """Restore the three damaged directories in place."""
        # --delete: the ruined and the torn checkpoint are newer than the snapshot, and must be removed.
        for path in (self.training / "checkpoints", self.training / "config", self.state / "run"):
            delete = ["--delete"] if path.name == "checkpoints" else []
            arguments = [
                "restore",
                "-s",
                chosen.id,
                "-p",
                str(path),
                "-d",
                str(path.parent),
                "--overwrite",
                *delete,
            ]
            self.command(*arguments, show=1)

    def compare_restored(self) -> None:
        """Check that every restored finished checkpoint is one that the job had saved under that name."""
        names = sorted(path.name for path in (self.training / "checkpoints").glob("step-*.ckpt"))
        if not names:
            raise StoryFailed("no checkpoint came back")
        for name in names:
            step = int(name[5:11])
            data = (self.training / "checkpoints" / name).read_bytes()
            if not data.startswith(b"TRAINCKP") or f'"step": {step}'.encode() not in data[:64]:
                raise StoryFailed(f"{name} came back, and is not what was saved at step {step}")
        narrate(f"{len(names)} checkpoints came back, the newest is {names[-1]}")

    def resume(self) -> None:
        """Resume the job from the newest whole checkpoint, through the mounts, to the end."""
        job = self.job(self.training, self.state, resume=True)
        for word, value in job.lines():
            if word == "damaged":
                raise StoryFailed(f"the job found {value} damaged after the restore")
            if word == "resumed":
                narrate(f"resumed at step {value}; the job computes on to step {STEPS}")
                if int(value) == 0:
                    raise StoryFailed("the job began again instead of resuming")
        if job.process.wait() != 0:
            raise StoryFailed("the resumed job failed")

    def compare_runs(self) -> None:
        """Check that final checkpoint, log, configuration and state have the same bytes in both runs."""
        final = f"checkpoints/step-{STEPS:06d}.ckpt"
        pairs = [
            (self.training / name, self.plain_training / name)
            for name in (final, "logs/train.log", "config/run.json")
        ] + [(self.state / "run/state.json", self.plain_state / "run/state.json")]
        for ours, theirs in pairs:
            if not filecmp.cmp(ours, theirs, shallow=False):
                raise StoryFailed(f"{ours.name} differs from the undisturbed run's")
        size = pairs[0][0].stat().st_size
        narrate(
            f"bit for bit the undisturbed run: parameters, both Adam moments, generator ({size:,} bytes), log, config, state"
        )

    def end(self) -> None:
        """End every job of the story."""
        for job in self.jobs:
            if job.process.poll() is None:
                job.kill()


def _on_signal(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextlib.contextmanager
def stage() -> Iterator[Story]:
    """Provide the work directory; remove it at the end with all that runs in it or is mounted there."""
    work = Path(tempfile.mkdtemp(prefix="ciuic-rescue-", dir=os.environ.get("CIUIC_RESCUE_DIR", "/var/tmp")))
    live = Live(work, interval=INTERVAL)
    story = Story(work, live)
    try:
        yield story
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A second Ctrl-C must not stop the cleaning up.
            signal.signal(number, signal.SIG_IGN)
        story.end()
        live.close()
        shutil.rmtree(work, ignore_errors=True)
        left = [str(work)] if work.exists() else []
        left += leftovers.mounts_below((work,)).values()
        narrate(f"cleaned up: {'nothing is left' if not left else 'LEFT: ' + ', '.join(left)}")


def main() -> int:
    """Play the story; return its exit status."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    try:
        with stage() as story:
            story.play()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (StoryFailed, CommandFailed, TimeoutError) as exc:
        print(f"make rescue: FAILED: {exc}", file=sys.stderr)
        return 1
    narrate("the run was rescued")
    return 0


if __name__ == "__main__":
    sys.exit(main())
