"""SIGKILL, SIGTERM and SIGINT of any part, at any time: the job continues, and no listed snapshot is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.leftovers import mounts_below
from support.live import Live, emptied_root, installed
from support.trees import assert_same, manifest
from support.until import until
from torture import kills

pytestmark = pytest.mark.mount


class Writer(threading.Thread):
    """Change files in the root all the time, as a job does, and collect the errors."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.over, self.errors, self.rounds = root, threading.Event(), [], 0

    def run(self) -> None:
        rng = random.Random(3)
        while not self.over.is_set():
            try:
                self._round(rng)
                self.rounds += 1
            except OSError as exc:
                self.errors.append(exc)
                time.sleep(0.02)

    def _round(self, rng: random.Random) -> None:
        name = f"file{rng.randrange(20)}"
        temporary = self.root / f".{name}.tmp"
        with open(temporary, "wb") as file:
            file.write(rng.randbytes(rng.randrange(1, 400_000)))
        os.replace(temporary, self.root / name)
        with open(self.root / "log", "a") as log:
            log.write(f"{self.rounds}\n")


@contextmanager
def _writing(root: Path) -> Iterator[Writer]:
    writer = Writer(root)
    writer.start()
    try:
        yield writer
    finally:
        writer.over.set()
        writer.join()


def _worker_pid(live: Live) -> int:
    status = live.status()
    assert status is not None
    return int(status["roots"][0]["worker_pid"])


def _captures(live: Live) -> list[int]:
    return [pid for pid, command in live.processes().items() if "-m ciuic.daemon.capture.process " in command]


def _works_again(live: Live, root: Path, into: Path) -> None:
    """Check that a snapshot can be taken, everything listed verifies, and the newest equals the root."""
    snapshot = until("a snapshot", lambda: _try_snapshot(live))
    live.run("verify", "--all", "--checksum")
    live.run("restore", "-s", snapshot, "-p", str(root), "-d", str(into))
    assert_same(manifest(root), manifest(into / root.name))


def _try_snapshot(live: Live) -> str | None:
    done = live.run("snapshot", "--wait", expect=None)
    return done.stdout.decode().strip() if done.returncode == 0 else None


def test_the_daemon_killed_and_started_again(protected: Live, root: Path, short_tmp: Path) -> None:
    """The job sees no error while the daemon is dead; a new one takes over the mount and the tracking."""
    protected.snapshot()
    assert protected.daemon is not None
    with _writing(root) as writer:
        until("a first round", lambda: writer.rounds > 3)
        protected.daemon.kill()
        protected.daemon.wait()
        rounds = writer.rounds
        until("rounds without a daemon", lambda: writer.rounds > rounds + 5)
        protected.start(root)
        rounds = writer.rounds
        until("rounds with the new daemon", lambda: writer.rounds > rounds + 5)
    assert writer.errors == []
    _works_again(protected, root, short_tmp / "out")


def test_a_root_is_mounted_again_when_its_worker_is_killed(
    protected: Live, root: Path, short_tmp: Path
) -> None:
    """The daemon mounts a root again after a kill of its worker; no data is lost.

    The next snapshot compares and does not rely on tracking.
    """
    (root / "file").write_text("before")
    protected.snapshot()
    with open(root / "kept", "w") as file:
        file.write("synced")
        file.flush()
        os.fsync(file.fileno())
    pid = _worker_pid(protected)
    os.kill(pid, signal.SIGKILL)
    until("a new worker", lambda: _worker_pid(protected) not in (0, pid))
    protected.wait_mounted(root)
    assert (root / "kept").read_text() == "synced"
    (root / "after").write_text("after")
    _works_again(protected, root, short_tmp / "out")


def test_captures_killed_at_random_times(shared: Live, short_tmp: Path) -> None:
    """A killed capture leaves no snapshot or a whole one, and the next capture takes its changes."""
    root = emptied_root(shared)
    rng = random.Random(11)
    with _writing(root) as writer:
        for _ in range(6):
            (root / f"bulk{rng.randrange(4)}").write_bytes(rng.randbytes(3_000_000))
            taker = subprocess.Popen(
                [str(installed()), "snapshot", "--wait"],
                env=shared.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                until("a capture", lambda taker=taker: _captures(shared) or taker.poll() is not None)
                time.sleep(rng.random() * 0.3)
                for pid in _captures(shared):
                    # It may have ended since.
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            finally:
                taker.wait(120)
            shared.run("verify", "--all", "--checksum")
    assert writer.errors == []
    _works_again(shared, root, short_tmp / "out")


def test_a_restore_ended_at_random_times_can_be_run_again(shared: Live, short_tmp: Path) -> None:
    """A restore interrupted at random times leaves whole files, and a last run completes the tree.

    The exit status says that it was interrupted, without a traceback.
    """
    root = emptied_root(shared)
    rng = random.Random(9)
    for number in range(60):
        (root / f"file{number}").write_bytes(rng.randbytes(400_000))
    snapshot = shared.snapshot()
    contents = {path.name: path.read_bytes() for path in root.iterdir()}
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        out = short_tmp / sig.name
        words = ("restore", "-s", snapshot, "-p", str(root), "-d", str(out), "--overwrite")
        for delay in (0, 0.1, 0.15, 0.2, 0.3):
            process = subprocess.Popen(
                [installed(), *words], env=shared.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            until("signal handlers", lambda pid=process.pid: _catches(pid, signal.SIGTERM))
            time.sleep(delay)
            process.send_signal(sig)
            _, stderr = process.communicate(timeout=60)
            assert b"Traceback" not in stderr, stderr.decode()
            assert process.returncode in (0, -sig if sig == signal.SIGKILL else 130), stderr.decode()
            for path in (out / root.name).glob("file*") if out.exists() else ():
                assert path.read_bytes() == contents[path.name], f"{path} is not whole"
        shared.run(*words)
        assert_same(manifest(root), manifest(out / root.name))


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether the process handles the signal (SigCgt of proc_pid_status(5)).

    The interpreter handles SIGINT by itself, from its first moment on: a handler of SIGTERM is the program's own.
    """
    caught = Path(f"/proc/{pid}/status").read_text().partition("\nSigCgt:\t")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_clean_stop_leaves_nothing_and_keeps_the_tracking(
    protected: Live, root: Path, short_tmp: Path
) -> None:
    """SIGTERM and SIGINT leave plain files and no mount, process or socket; the next start keeps tracking."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        (root / "file").write_text(f"before {sig}")
        protected.snapshot()
        (root / "more").write_text(f"not yet captured {sig}")
        protected.stop(sig)
        assert mounts_below((short_tmp,)) == {}
        assert protected.processes() == {}
        assert not (protected.top / "run/control.sock").exists()
        assert (root / "more").read_text() == f"not yet captured {sig}"
        protected.start(root)
        _works_again(protected, root, short_tmp / sig.name)


def test_stopping_under_a_running_job_does_not_hurt_it(protected: Live, root: Path) -> None:
    """A job with an open file writes on through the stop, and its writes are in the plain file."""
    with open(root / "log", "w") as log:
        log.write("before\n")
        log.flush()
        protected.stop()
        log.write("after\n")
        log.flush()
        os.fsync(log.fileno())
    until("the last worker's end", lambda: protected.processes() == {})
    assert (root / "log").read_text() == "before\nafter\n"


def test_everything_killed_at_once(protected: Live, root: Path, short_tmp: Path) -> None:
    """A new start after the death of daemon, worker and capture recovers mount and snapshots.

    It then takes a correct snapshot.
    """
    (root / "file").write_bytes(os.urandom(2_000_000))
    before = protected.snapshot()
    (root / "file2").write_bytes(os.urandom(2_000_000))
    taker = subprocess.Popen([str(installed()), "snapshot"], env=protected.env, stdout=subprocess.DEVNULL)
    taker.wait(60)
    assert protected.daemon is not None
    protected.daemon.kill()
    for pid in protected.processes():
        os.kill(pid, signal.SIGKILL)
    protected.daemon.wait()
    protected.start(root)
    assert before in [row.id for row in protected.list()]
    _works_again(protected, root, short_tmp / "out")


def test_interval_snapshots_happen_by_themselves_and_catch_up(short_tmp: Path, root: Path) -> None:
    """Snapshots appear at a short interval without a request, and one at the start after a downtime."""
    top = short_tmp / "c"
    top.mkdir()
    with Live(top, interval="1s") as live:
        live.run("protect", str(root))
        live.start(root)
        for count in (1, 2):
            (root / "file").write_text(str(count))
            until(f"{count + 1} snapshots", lambda count=count: len(live.list()) > count)
        live.stop()
        newest = live.list()[0].id
        # Longer than the interval: the next start is late.
        time.sleep(1.2)
        live.start(root)
        until("the snapshot that was missed", lambda: live.list()[0].id != newest)
        live.stop()


@pytest.mark.slow
def test_prune_and_check_killed_under_load(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prune and check, killed under load, break no promise: every reported snapshot is listed and verifies.

    The next snapshot restores to exactly the root. A short round of the torture, for the two processes that
    no other test here kills.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))
    for seed in (5, 6, 7):
        figures = kills.run(0, seed, ("prune", "check"))
        failures = [text for figure in figures for text in figure.failures]
        if not all(text.endswith("was killed at work") for text in failures):
            # A promise was broken: do not try again.
            break
        if not failures:
            # On a busy machine a prune may be over before it is killed: repeat once.
            break
    assert failures == []
