"""Host of `make rescue-remote`: the first one, which is lost, or the second one, which goes on.

Runs as process 1 of namespaces of its own (remote_story.py). Its disk is a tmpfs that no other process sees. It
narrates on standard output; lines that begin with ``@`` are for the story.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from acts import (
    CHECKPOINT_BYTES,
    INTERVAL,
    KILL_AFTER_STEP,
    SNAPSHOTS_WANTED,
    STEPS,
    Acts,
    StoryFailed,
    narrate,
    outcome,
    tell,
    wait_while_progressing,
)
from support.live import Live, installed
from support.object_servers import environment_for_s3
from support.remote_training import STATES_STEPS, run_states, stored_states

from ciuic.protocol.stored_remotely import STATE_VARIABLE, read_record
from ciuic.repository import Repository

PLAIN = bool(os.environ.get("CIUIC_RESCUE_PLAIN"))
"""Restore everything before the training goes on, not lazily."""
# Slow: it must not end before its host, which waits for uploads.
_STEP_SECONDS = 1.0
_PASSPHRASE = "written on the same paper"


def report(word: str, value: str) -> None:
    """Tell the story something."""
    print(f"@{word} {value}", flush=True)


class Node(Acts):
    """A host with a disk of its own, a ciuic, and a door to the object store."""

    def __init__(self, name: str, disk: Path, bucket: str, port: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", name, str(disk)], check=True, timeout=30)
        socket.sethostname(name)
        self.name = name
        place = bucket.replace("PORT", port)
        self.files_url, self.states_url = f"{place}/files", f"{place}/states"
        # Of ssh the environment is the story's.
        variables = environment_for_s3(f"http://127.0.0.1:{port}") if place.startswith("s3:") else {}
        variables |= {
            "HOME": str(disk),
            "XDG_CACHE_HOME": str(disk / "cache"),
            "XDG_STATE_HOME": str(disk / "xdg-state"),
            STATE_VARIABLE: str(disk / "upload"),
        }
        os.environ.update(variables)
        self.disk = disk
        self._not_armed: StoryFailed | None = None
        super().__init__(disk, Live(disk, interval=INTERVAL))
        routes = Path("/proc/net/route").read_text().splitlines()[1:]
        narrate(f"{name}: an empty disk, {len(routes)} network routes, one door to the object store")

    def protect(self) -> None:
        """Protect both directories under a daemon, with an uploader beside it."""
        self.command("protect", str(self.training), str(self.state))
        self.live.start(self.training, self.state)
        with open(self.disk / "upload.log", "ab") as log:
            subprocess.Popen(
                [str(installed()), "remote", "upload"],
                env=self.live.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        narrate(
            f"{self.name}: the daemon takes a snapshot every {INTERVAL}; `ciuic remote upload` sends each one"
        )

    def run_states(self, *, step_seconds: float) -> subprocess.Popen[bytes]:
        """Start the training that saves with SnapshotManager, to the bucket as well."""
        environment = os.environ | {"CIUIC_REMOTE_PASSPHRASE": _PASSPHRASE}
        return run_states(self.states_url, self.disk / "states.json", environment, step_seconds=step_seconds)

    # -- the first host

    def train(self) -> None:
        """Train and upload; report when a save is under way and the store has enough to go on from."""
        for path in (self.training, self.state):
            path.mkdir()
        made = json.loads(self.command("remote", "init", self.files_url, "--json"))
        report("recovery-key", made["recovery_key"])
        self.protect()
        job = self.job(self.training, self.state)
        narrate(f"{self.name}: a training runs, which writes files and knows nothing of ciuic")
        if STATES_STEPS:
            self.run_states(step_seconds=_STEP_SECONDS)
            narrate(f"{self.name}: another one runs, which saves with SnapshotManager({self.states_url!r})")
        armed = threading.Event()
        threading.Thread(target=self._arm, args=(armed,), daemon=True).start()
        for word, value in job.lines():
            if word != "half" or int(value) <= KILL_AFTER_STEP:
                continue
            if armed.is_set() and self._not_armed is None:
                report("in-save", value)
                # The story ends this host now.
                signal.pause()
            # The job must not end before its host: it waits until there is something to go on from.
            job.process.send_signal(signal.SIGSTOP)
            armed.wait()
            if self._not_armed is not None:
                raise self._not_armed
            job.process.send_signal(signal.SIGCONT)
        raise StoryFailed("the job ended before its host was lost")

    def _arm(self, armed: threading.Event) -> None:
        try:
            wait_while_progressing("uploads", self._enough_is_stored, self._upload_progress)
            narrate(f"{self.name}: {SNAPSHOTS_WANTED} snapshots with checkpoints are on the object store")
        except Exception as error:
            log = (self.disk / "upload.log").read_text()
            self._not_armed = StoryFailed(f"{error}\n{log}\n{self.live.log_tail()}")
        armed.set()

    def _upload_progress(self) -> object:
        """Return what changes while snapshots are taken and sent, and not by retrying alone."""
        sizes, stored = self._sizes_and_stored()
        # Of the loopback device, which leads to the store; its first figure is what was received.
        (device,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
        mib_sent = int(device.split(":")[1].split()[0]) >> 20
        return (
            min(sum(size > CHECKPOINT_BYTES for size in sizes.values()), SNAPSHOTS_WANTED),
            stored,
            mib_sent,
        )

    def _sizes_and_stored(self) -> tuple[dict[str, int], frozenset[str]]:
        """Return the bytes of each snapshot, and the snapshots that the object store has."""
        record = read_record("remote", self.disk / "upload")
        with Repository.open(self.live.repository) as repository:
            sizes = {str(one.id): one.size_bytes for one in repository.snapshots.list()}
        return sizes, frozenset() if record is None else record.stored

    def _enough_is_stored(self) -> bool:
        sizes, stored = self._sizes_and_stored()
        if sum(sizes.get(id_, 0) > CHECKPOINT_BYTES for id_ in stored) < SNAPSHOTS_WANTED:
            return False
        trainings = self.disk / "xdg-state/ciuic/trainings"
        return not STATES_STEPS or (
            trainings.is_dir() and any(stored_states(one) for one in trainings.iterdir())
        )

    # -- the second host

    def go_on(self, recovery_key: str) -> None:
        """Bring the run back with the bucket and the recovery key alone, and end it."""
        self.live.env["CIUIC_REMOTE_RECOVERY_KEY"] = recovery_key
        self.command("remote", "join", self.files_url)
        chosen = self.choose()
        report("reached", f"snapshot {chosen} chosen and verified")
        states = self.run_states(step_seconds=0) if STATES_STEPS else None
        if PLAIN:
            self.restore_plainly(chosen)
        else:
            self.restore_lazily(chosen)
        report("reached", f"trained to step {STEPS}")
        ended = self.ended_states(states) if states is not None else {}
        last = self.command("snapshot", "--wait=remote").split()[0]
        self.live.env["CIUIC_REMOTE_RECOVERY_KEY"] = recovery_key
        hosts = {line.split()[-1] for line in self.from_store("list", show=4).splitlines()}
        if last not in self.from_store("list", "--machine-readable") or not hosts:
            raise StoryFailed(f"{last} is not on the object store")
        files = outcome(self.training, self.state)
        report("outcome", json.dumps({"files": files, "states": ended}))

    def restore_plainly(self, chosen: str) -> None:
        """Restore everything, protect it again, and train to the end."""
        self.restore(chosen)
        self.compare_restored()
        report("reached", "restored")
        self.protect()
        report("reached", "protected again")
        self.resume(lambda: report("reached", "training goes on"))

    def restore_lazily(self, chosen: str) -> None:
        """Train on what is there while the rest is fetched; protect it again once it is a plain directory."""
        self.restore(chosen, "--lazy")
        report("reached", "mounted, and being fetched")

        def trains() -> None:
            report("reached", "training goes on")
            self.show_missing()
            wait_while_progressing("the end of the lazy restore", self.is_plain, self.lazy_restores)
            report("reached", "everything is there")
            self.protect()
            report("reached", "protected again")

        self.resume(trains)

    def show_missing(self) -> None:
        """Say how much is not there yet."""
        found = self.lazy_restores()
        left, total = (sum(one[key] for one in found) / 2**20 for key in ("bytes_left", "bytes_total"))
        narrate(f"{self.name}: {left:.1f} of {total:.1f} MiB are still on the object store alone")

    def lazy_restores(self) -> list[dict[str, Any]]:
        """Return what `ciuic restore --status` says."""
        found: list[dict[str, Any]] = json.loads(self.live.run("restore", "--status", "--json").stdout)[
            "restores"
        ]
        return found

    def restore(self, chosen: str, *options: str) -> None:
        """Restore both directories to where they were."""
        for path in (self.training, self.state):
            self.from_store("restore", *options, "-s", chosen, "-p", str(path), "-d", str(self.disk), show=2)

    def is_plain(self) -> bool:
        """Return whether the lazy restores have ended; raise if one did not end well."""
        found = self.lazy_restores()
        if any(one["state"] == "interrupted" or one["code"] for one in found):
            raise StoryFailed(f"a lazy restore did not end well: {found}")
        return len(found) == 2 and all(one["state"] in ("closing", "complete") for one in found)

    def ended_states(self, states: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Return what the training with SnapshotManager left."""
        if states.wait() != 0:
            log = (self.disk / "states.json.log").read_text()
            raise StoryFailed(f"the training with SnapshotManager failed\n{log}")
        ended: dict[str, Any] = json.loads((self.disk / "states.json").read_text())
        report("reached", f"the other training found its state of step {ended['began']} by itself, and ended")
        return ended

    def from_store(self, *arguments: str, show: int = 0) -> str:
        """Run a command that reads the object store alone."""
        return self.command("--repo", self.files_url, *arguments, show=show)

    def choose(self) -> str:
        """Return the newest snapshot that has a checkpoint, verified."""
        rows = [
            line.split("|") for line in self.from_store("list", "--machine-readable", show=4).splitlines()
        ]
        chosen = next((id_ for id_, _, size in rows if int(size) > CHECKPOINT_BYTES), None)
        if chosen is None:
            raise StoryFailed("there is no snapshot with a checkpoint")
        # A restore checks every byte that it brings; before one that is to be quick, it is enough that all is there.
        self.from_store("verify", chosen, *(["--checksum"] if PLAIN else []), show=3)
        return chosen

    def end(self) -> None:
        """End jobs and daemon in good order; the rest ends with process 1."""
        super().end()
        self.live.close()


def main() -> int:
    """Be a host; return its exit status."""
    name, disk, bucket, port = sys.argv[1:]

    def play() -> None:
        node = Node(name, Path(disk), bucket, port)
        try:
            if name == "node-a":
                node.train()
            else:
                node.go_on(sys.stdin.readline().strip())
        finally:
            node.end()

    return tell(f"make rescue-remote: {name}", play, lambda cause: report("failed", cause))


if __name__ == "__main__":
    sys.exit(main())
