"""Tests of a capture process from its job to its last message, whatever it prints and however it ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from ciuic.daemon.capture.job import EXIT_INTERRUPTED, CaptureJob, CaptureProgress, Done, Failed, RootJob
from ciuic.daemon.snapshots.capture_process import CODE_KILLED, CaptureProcess, Captures, wait_for_stranger
from ciuic.repository import Repository
from ciuic.system.processes import start_ticks

JOB = CaptureJob(repository="/r", id="cs-123456", time_ns=1, host="h", roots=())
HEAD = """
import os, sys, json, time, signal
job = json.loads(sys.stdin.buffer.readline())
def say(**message): print(json.dumps(message), flush=True)
def done(): say(event="done", id=job["id"], new_bytes=1, size_bytes=2, files=3, entries=4, files_read=5, bytes_read=6,
                modes={}, seconds=0.5)
def progress(n): say(event="progress", root="", entries=n, files_read=0, bytes_read=0, new_bytes=0)
"""


class Run:
    """The result of a capture played by a script."""

    def __init__(self, script: str, tmp_path: Path, fds: tuple[int, ...] = ()) -> None:
        self.progress: list[int] = []
        self.first_progress = trio.Event()
        self.pids: list[int] = []
        self.fds = fds
        self.process = CaptureProcess(cwd=tmp_path, command=[sys.executable, "-c", HEAD + script])

    async def go(self) -> Done | Failed:
        with trio.fail_after(20):
            return await self.process.run(
                JOB, self.fds, on_start=self.pids.append, on_progress=lambda message: self._note(message)
            )

    def _note(self, message: CaptureProgress) -> None:
        self.progress.append(message.entries)
        self.first_progress.set()


def test_progress_is_passed_on_and_the_last_word_returned(tmp_path: Path) -> None:
    """Progress is passed on in order, and Done with exit status 0 is the result."""
    run = Run("progress(1); progress(2); done()", tmp_path)
    outcome = trio.run(run.go)
    assert isinstance(outcome, Done)
    assert (outcome.id, run.progress) == ("cs-123456", [1, 2])


def test_a_refusal_is_returned(tmp_path: Path) -> None:
    """A Failed message is returned with message, hint and code."""
    run = Run("say(event='failed', error='no', hint='do', code=75); sys.exit(75)", tmp_path)
    assert trio.run(run.go) == Failed(error="no", hint="do", code=75)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("sys.exit(3)", "exit status 3"),
        ("progress(1)", "exit status 0"),
    ],
)
def test_an_end_without_a_word_is_no_success(tmp_path: Path, script: str, words: str) -> None:
    """A capture that is killed or ends without Done has failed."""
    outcome = trio.run(Run(script, tmp_path).go)
    assert isinstance(outcome, Failed)
    assert outcome.code == CODE_KILLED
    assert words in outcome.error


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)", "say(event='failed', error='no')"])
def test_capture_that_sent_done_has_succeeded(tmp_path: Path, end: str) -> None:
    """A capture counts as successful after Done however it ends, because the snapshot is durable then."""
    assert isinstance(trio.run(Run(f"done(); {end}", tmp_path).go), Done)


def test_done_is_reported_before_the_process_ends(tmp_path: Path) -> None:
    """Done is reported before the process ends, and the run returns after it has ended."""
    run = Run("done(); sys.stdin.close(); signal.pause()", tmp_path)
    heard = trio.Event()

    async def on_done(_: Done) -> None:
        heard.set()
        # The script has sent Done, and waits.
        os.kill(run.pids[0], signal.SIGTERM)

    async def main() -> None:
        with trio.fail_after(20):
            outcome = await run.process.run(
                JOB, (), on_start=run.pids.append, on_progress=lambda _: None, on_done=on_done
            )
        assert isinstance(outcome, Done)

    trio.run(main)
    assert heard.is_set()
    assert not Path(f"/proc/{run.pids[0]}").exists()


def test_noise_between_messages_does_no_harm(tmp_path: Path) -> None:
    """Lines that are no message are ignored."""
    run = Run("print('hello'); print('{'); progress(1); print(); done()", tmp_path)
    assert isinstance(trio.run(run.go), Done)
    assert run.progress == [1]


def test_a_capture_that_does_not_read_its_job_is_no_deadlock(tmp_path: Path) -> None:
    """A process that ends at once is reported, although its job could not be delivered."""
    run = Run("", tmp_path)
    run.process = CaptureProcess(cwd=tmp_path, command=["/bin/false"])
    outcome = trio.run(run.go)
    assert isinstance(outcome, Failed)
    assert "exit status 1" in outcome.error


def test_descriptors_arrive_under_their_numbers(tmp_path: Path) -> None:
    """The process has the given descriptors under their numbers, and no others beside the standard ones."""
    fd, other = os.open(tmp_path, os.O_PATH), os.open("/", os.O_PATH)
    script = (
        f"same = os.path.samestat(os.stat({str(tmp_path)!r}), os.fstat({fd}))\n"
        "extra = set(map(int, os.listdir('/proc/self/fd'))) - {0, 1, 2, " + str(fd) + "}\n"
        "extra = {n for n in extra if os.path.exists(f'/proc/self/fd/{n}')}\n"
        "done() if same and not extra else sys.exit(9)"
    )
    try:
        assert isinstance(trio.run(Run(script, tmp_path, fds=(fd,)).go), Done)
    finally:
        os.close(fd)
        os.close(other)


def test_capture_has_its_own_session(tmp_path: Path) -> None:
    """A capture has a session of its own, so a Ctrl-C in the daemon's terminal does not reach it."""
    assert isinstance(
        trio.run(Run("done() if os.getsid(0) == os.getpid() else sys.exit(9)", tmp_path).go), Done
    )


def test_cancelling_asks_first(tmp_path: Path) -> None:
    """A cancelled capture gets SIGTERM, may clean up, and has ended when the cancellation returns."""
    script = (
        "def stop(*_):\n    open('tidied', 'w').close()\n    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, stop); progress(1); signal.pause()"
    )
    run = Run(script, tmp_path)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.go)
            await run.first_progress.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert (tmp_path / "tidied").exists()
    assert not Path(f"/proc/{run.pids[0]}").exists()


def test_killing_gives_the_reason(tmp_path: Path) -> None:
    """A capture whose session ended is killed at once, and fails with that reason."""
    run = Run("signal.signal(signal.SIGTERM, signal.SIG_IGN); progress(1); signal.pause()", tmp_path)

    async def main() -> None:
        async with trio.open_nursery() as nursery:

            async def check() -> None:
                assert await run.go() == Failed(error="gone", code=EXIT_INTERRUPTED)

            nursery.start_soon(check)
            await run.first_progress.wait()
            run.process.kill("gone")

    trio.run(main)


def test_killed_before_it_started_is_killed(tmp_path: Path) -> None:
    """A session that ends between decision and start leaves no capture running."""
    run = Run("time.sleep(30); done()", tmp_path)
    run.process.kill("gone")
    assert trio.run(run.go) == Failed(error="gone", code=EXIT_INTERRUPTED)


def test_strangers_are_waited_for_by_identity(tmp_path: Path) -> None:
    """A process is waited for or killed only if its start time is that in the journal."""
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "import signal; signal.pause()"])
    ticks = start_ticks(pid)

    async def main() -> None:
        with trio.fail_after(10):
            await wait_for_stranger(pid, ticks + 1, kill=True)
            assert start_ticks(pid) == ticks
            await wait_for_stranger(pid, ticks, kill=True)

    trio.run(main)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    trio.run(wait_for_stranger, pid, ticks)


class Forked:
    """Captures made by fork, each as the list of processes shows it."""

    def __init__(self, tmp_path: Path) -> None:
        self.captures = Captures(tmp_path)
        self.shown: list[str] = []
        self.standby: list[int] = []

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.captures.close()

    async def run(self, job: CaptureJob, fds: tuple[int, ...] = ()) -> Done | Failed:
        process = self.captures.new()
        with trio.fail_after(30):
            return await process.run(
                job, fds, on_start=self._look, on_progress=lambda _: self._look(process.pid)
            )

    def _look(self, pid: int) -> None:
        self.shown.append(
            Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
        )
        self.standby.append(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))


def _job(repository: Path, fd: int, snapshot: str) -> CaptureJob:
    root = RootJob(path=b"/root", backing_fd=fd)
    return CaptureJob(repository=str(repository), id=snapshot, time_ns=1, host="h", roots=(root,))


def test_a_forked_capture_is_a_capture_like_any_other(tmp_path: Path) -> None:
    """A forked capture gets its job and descriptors, reports Done, and has a title of its own."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root/file").write_bytes(b"content")
    Repository.create(tmp_path / "repository").close()
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    try:
        with Forked(tmp_path) as forked:
            for number in range(2):
                outcome = trio.run(forked.run, _job(tmp_path / "repository", fd, f"cs-00000{number}"), (fd,))
                assert isinstance(outcome, Done), outcome
                assert outcome.files == 1
            assert forked.shown[-1] == f"{sys.executable} -m ciuic.daemon.capture.process"
            assert len(set(forked.standby)) == 1
            assert forked.standby[0] != os.getpid()
    finally:
        os.close(fd)
    with Repository.open(tmp_path / "repository") as repository:
        assert set(repository.snapshots.ids()) == {"cs-000000", "cs-000001"}


def test_a_failing_forked_capture_returns_its_last_message(tmp_path: Path) -> None:
    """The last message and the exit status of a failing forked capture are returned."""
    with Forked(tmp_path) as forked:
        outcome = trio.run(forked.run, _job(tmp_path / "missing", -1, "cs-000000"))
    assert isinstance(outcome, Failed)
    assert outcome.code == 3


def test_captures_go_on_without_the_process_that_forks_them(tmp_path: Path) -> None:
    """A killed process that forks captures is replaced when the next capture is due."""
    Repository.create(tmp_path / "repository").close()
    with Forked(tmp_path) as forked:
        trio.run(forked.run, _job(tmp_path / "missing", -1, "cs-000000"))
        os.kill(forked.standby[0], signal.SIGKILL)
        os.waitid(os.P_PID, forked.standby[0], os.WEXITED | os.WNOWAIT)
        outcome = trio.run(forked.run, _job(tmp_path / "missing", -1, "cs-000000"))
        assert isinstance(outcome, Failed)
        assert outcome.code == 3
        assert forked.standby[0] not in (forked.standby[-1], os.getpid())
