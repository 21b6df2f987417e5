"""Cost of an upload for a training beside it: steps and local commits with and without one, in alternation.

    python -m benchmarks.remote_training                                  the figures that are reported
    python -m benchmarks.remote_training --rounds 1 --seconds 1           smoke test; its figures mean nothing

One uploader with ``bandwidth = "50 MiB"`` sends noise to a directory in memory, so that no server takes part of the machine;
between its turns it is stopped (SIGSTOP). *step*: median step of a training on the processor, with one thread (as where a GPU
computes) and with all. *commit*: from the call of a save of 64 MiB to the durable snapshot, on the disk that the uploader reads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.remote import make_files

_MIB: Final = 1 << 20
_RATE: Final = 50 * _MIB
_SETTLE_SECONDS: Final = 1.0
_COMMITS: Final = 4
_STATE_BYTES: Final = 64 * _MIB
BESIDE: Final = ("nothing", "an upload")


def prepare(top: Path, mib: int) -> None:
    """Make a remote in memory, and a repository with a snapshot of so much noise."""
    from benchmarks.remote import _store as store
    from ciuic.remote.access import add_slot, init_remote
    from ciuic.remote.objects.opening import open_objects
    from ciuic.remote.sealing.key_slots import new_key_text, read_key_file
    from ciuic.remote.sealing.sealer import MasterKey
    from ciuic.repository import Repository

    settings = json.loads((top / "settings").read_text())
    objects = open_objects(settings["url"], make=True)
    remote = init_remote(objects, master=MasterKey.generate(), block_size=262144)
    (top / "key").write_bytes(new_key_text())
    (top / "key").chmod(0o600)
    add_slot(remote, "host", read_key_file(str(top / "key")))
    Repository.create(top / "repository", identity=remote.identity).close()
    make_files(top / "source", mib, 1)
    store(top, top / "source")


def upload(top: Path) -> None:
    """Upload until killed, as the service does."""
    from ciuic.config import Config, RemoteConfig
    from ciuic.remote import replication

    url = json.loads((top / "settings").read_text())["url"]
    remote = RemoteConfig(name="remote", url=url, key_file=top / "key", bandwidth_bytes=_RATE)
    replication.run(Config(remotes=(remote,)), top / "repository", state_dir=top / "state")


class Training:
    """A training on the processor, and saves of its state."""

    def __init__(self, place: Path) -> None:
        self._torch: Any = importlib.import_module("torch")
        torch = self._torch
        torch.manual_seed(1)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(512, 512)
        self._noise = torch.randint(0, 255, (_STATE_BYTES,), dtype=torch.uint8)
        from ciuic import SnapshotManager

        self._manager = SnapshotManager(place, max_snapshots=2)
        self._manager.register(model=_State({"noise": self._noise}))

    def steps(self, seconds: float, threads: int) -> list[float]:
        """Return the duration of each step."""
        self._torch.set_num_threads(threads)
        found = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            self._optimizer.zero_grad()
            (self._model(self._batch) ** 2).mean().backward()
            self._optimizer.step()
            found.append(time.perf_counter() - began)
        return found

    def commit(self) -> float:
        """Return the seconds until a save is durable."""
        self._noise += 1
        began = time.perf_counter()
        self._manager.save_snapshot(wait=True)
        return time.perf_counter() - began


class _State:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def measure(top: Path, memory: Path, rounds: int, seconds: float) -> str:
    """Return the table."""
    processors = len(os.sched_getaffinity(0))
    mib = int(rounds * (2 * seconds + 6) * 55) + 300
    (top / "settings").write_text(json.dumps({"url": f"file://{memory}/remote"}))
    prepare(top, mib)
    training = Training(top / "saves")
    # The first step and the first save make what later ones find.
    training.steps(1, 1)
    training.commit()
    command = (sys.executable, "-m", "benchmarks.remote_training", "--child", str(top))
    uploader = subprocess.Popen(command)
    found: dict[str, dict[str, list[float]]] = {}
    rates = []
    try:
        # Its packs begin small.
        time.sleep(4)
        for number in range(rounds):
            for beside in BESIDE[number % 2 :] + BESIDE[: number % 2]:
                uploader.send_signal(signal.SIGSTOP if beside == "nothing" else signal.SIGCONT)
                time.sleep(_SETTLE_SECONDS)
                began, before = time.monotonic(), _stored_bytes(memory)
                for name, threads in (("step, 1 thread", 1), (f"step, {processors} threads", processors)):
                    turn = training.steps(seconds, threads)
                    found.setdefault(name, {}).setdefault(beside, []).append(statistics.median(turn))
                commits = [training.commit() for _ in range(_COMMITS)]
                found.setdefault("commit", {}).setdefault(beside, []).append(statistics.median(commits))
                if beside != "nothing":
                    rates.append((_stored_bytes(memory) - before) / _MIB / (time.monotonic() - began))
        assert uploader.poll() is None
    finally:
        uploader.kill()
        uploader.wait()
    lines = [
        f"{rounds} rounds of {seconds:.0f} s, medians; {processors} processors; "
        f"uploaded at {statistics.median(rates):.1f} MiB/s ({min(rates):.1f} to {max(rates):.1f}); load {os.getloadavg()[0]:.1f}.",
        "",
        "| | alone, ms | beside an upload, ms | ratio | ratios of the rounds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, by in found.items():
        alone, together = (by[beside] for beside in BESIDE)
        ratios = sorted(other / one for one, other in zip(alone, together, strict=True))
        one, other = statistics.median(alone), statistics.median(together)
        lines.append(
            f"| {name} | {1000 * one:.1f} | {1000 * other:.1f} | {statistics.median(ratios):.3f} "
            f"| {', '.join(f'{ratio:.2f}' for ratio in ratios)} |"
        )
    return "\n".join(lines) + "\n"


def _stored_bytes(memory: Path) -> int:
    return sum(path.stat().st_size for path in (memory / "remote").rglob("*") if path.is_file())


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.remote_training", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        upload(options.child)
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="ciuic-beside-") as disk,
        tempfile.TemporaryDirectory(prefix="ciuic-beside-", dir="/dev/shm") as memory,
    ):
        sys.stdout.write(measure(Path(disk), Path(memory), options.rounds, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
