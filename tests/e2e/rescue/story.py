"""Rescue story with the installed commands: protect, train, kill, ruin, choose the last good, drill, restore, resume, compare.

Run by `make rescue`, on directories of its own; arguments are the seeds of the trainings to play it with, one after the other. Exits with 0 when the resumed run reached, bit for bit, the
state of an undisturbed run; with 1 and a reason otherwise. Cleans up in every case, also when interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from acts import (
    CHECKPOINT_BYTES,
    INTERVAL,
    KILL_AFTER_STEP,
    SEED,
    SNAPSHOTS_WANTED,
    STEPS,
    Acts,
    StoryFailed,
    Training,
    narrate,
    outcome,
    require_same,
    signals_ignored,
    tell,
)
from support import leftovers
from support.live import Live
from support.until import until


class Story(Acts):
    """The stage: a work directory with two roots, a reference run beside them, and a ciuic of its own."""

    def __init__(self, work: Path, live: Live, seed: int) -> None:
        super().__init__(work, live, seed)
        self.plain_training, self.plain_state = work / "undisturbed/training", work / "undisturbed/state"
        for path in (self.training, self.state, self.plain_training, self.plain_state):
            path.mkdir(parents=True)

    # -- the acts

    def play(self) -> None:
        """Play every act in turn."""
        narrate(
            f"the same {STEPS} steps are computed once undisturbed, in plain directories, to compare with at the end"
        )
        reference = self.job(self.plain_training, self.plain_state)
        self.protect()
        self.train_until_killed()
        self.ruin()
        chosen = self.choose_snapshot()
        self.prove(chosen)
        self.bring_back(chosen)
        reference.finish()
        self.compare_restored()
        self.resume()
        require_same(outcome(self.training, self.state), outcome(self.plain_training, self.plain_state))

    def protect(self) -> None:
        """Protect both roots under a running daemon."""
        self.command("protect", str(self.training), str(self.state))
        self.live.start(self.training, self.state)
        narrate(f"the daemon runs; both roots are mounted in place; a snapshot every {INTERVAL} by itself")

    def train_until_killed(self) -> None:
        """Kill the job in the middle of a save, once snapshots hold checkpoints."""
        resume = False
        while True:
            job = self.job(self.training, self.state, resume=resume)
            narrate(f"the training job runs as process {job.process.pid} and writes through the mounts")
            step = self.kill_in_save(job)
            folder = self.training / "checkpoints"
            torn, final = folder / f".step-{step:06d}.npz.tmp", folder / f"step-{step:06d}.npz"
            if torn.exists() and not final.exists():
                break
            narrate(f"the kill came just after the save of step {step}; once more")
            resume = True
        narrate(
            f"SIGKILL in the middle of saving step {step}: {torn.name} has {torn.stat().st_size:,} bytes and stays torn"
        )

    def kill_in_save(self, job: Training) -> int:
        """Return the step whose save was under way when SIGKILL was sent."""
        has_snapshots = False
        for word, value in job.lines():
            if word == "half" and int(value) > KILL_AFTER_STEP:
                if has_snapshots:
                    job.kill()
                    return int(value)
                # It does not end before them. Listing takes longer than a save: the next one's kill follows its line at once.
                job.process.send_signal(signal.SIGSTOP)
                until("snapshots with checkpoints", self.snapshots_with_checkpoints)
                job.process.send_signal(signal.SIGCONT)
                has_snapshots = True
        raise StoryFailed("the job ended before it was killed")

    def snapshots_with_checkpoints(self) -> bool:
        """Return whether enough automatic snapshots hold a checkpoint."""
        return sum(row.size_bytes > CHECKPOINT_BYTES for row in self.live.list()) >= SNAPSHOTS_WANTED

    def ruin(self) -> None:
        """Corrupt the newest checkpoint, delete others and the configuration, and truncate the state."""
        checkpoints = sorted((self.training / "checkpoints").glob("step-*.npz"))
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

    def choose_snapshot(self) -> str:
        """Return the snapshot that `restore --last-good` would take, once a snapshot has the ruins."""
        narrate("nobody noticed: the daemon goes on to take snapshots, of the ruins")
        before = {row.id for row in self.live.list()}
        until("a snapshot of the ruins", lambda: {row.id for row in self.live.list()} - before)
        self.command("list", "--machine-readable", show=4)
        self.command("checkpoints", show=4)
        folder = self.training / "checkpoints"
        plan = self.live.json("restore", "--last-good", "-p", str(folder), "--overwrite", "--dry-run")
        narrate(f"$ ciuic restore --last-good -p {folder} --overwrite --dry-run")
        (choice,) = plan["last_good"]
        for passed in choice["passed_over"]:
            print(f"             passed over {passed['snapshot']}: {passed['reason']}")
        print(f"             chosen: {choice['snapshot']}, {Path(choice['checkpoint']).name}")
        if not choice["passed_over"]:
            raise StoryFailed("the snapshot of the ruins was taken for a good one")
        return str(choice["snapshot"])

    def prove(self, chosen: str) -> None:
        """Check every byte of the snapshot, and restore its newest checkpoint as a drill."""
        self.command("verify", chosen, "--checksum", show=3)
        self.command("drill", chosen, "--scratch", str(self.training.parent), show=3)

    def bring_back(self, chosen: str) -> None:
        """Restore the three damaged directories in place."""
        # --delete: the ruined and the torn checkpoint are newer than the snapshot, and must be removed.
        checkpoints = self.training / "checkpoints"
        words = (
            "restore",
            "--last-good",
            "-p",
            str(checkpoints),
            "-d",
            str(self.training),
            "--overwrite",
            "--delete",
        )
        self.command(*words, show=4)
        for path in (self.training / "config", self.state / "run"):
            self.command(
                "restore", "-s", chosen, "-p", str(path), "-d", str(path.parent), "--overwrite", show=1
            )


@contextlib.contextmanager
def stage(seed: int) -> Iterator[Story]:
    """Provide the work directory; remove it at the end with all that runs in it or is mounted there."""
    work = Path(tempfile.mkdtemp(prefix="ciuic-rescue-", dir=os.environ.get("CIUIC_RESCUE_DIR", "/var/tmp")))
    live = Live(work, interval=INTERVAL)
    story = Story(work, live, seed)
    try:
        yield story
    finally:
        with signals_ignored():
            story.end()
            live.close()
            shutil.rmtree(work, ignore_errors=True)
            left = [str(work)] if work.exists() else []
            left += leftovers.mounts_below((work,)).values()
            narrate(f"cleaned up: {'nothing is left' if not left else 'LEFT: ' + ', '.join(left)}")


def main() -> int:
    """Play the story; return its exit status."""

    def play() -> None:
        for seed in map(int, sys.argv[1:] or (SEED,)):
            with stage(seed) as story:
                story.play()
            narrate(f"the run of seed {seed} was rescued")

    return tell("make rescue", play)


if __name__ == "__main__":
    sys.exit(main())
