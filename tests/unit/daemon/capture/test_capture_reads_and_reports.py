"""The capture process with a real repository: what it reads, reports, leaves and returns."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.capture_bench import snapshot_manifest
from support.core_driver import open_backing
from support.stored import read_file, store
from support.trees import assert_same, make_everything, manifest
from support.until import until

from ciuic.daemon.capture import content, space
from ciuic.daemon.capture import process as capture
from ciuic.daemon.capture.job import (
    EXIT_INTERRUPTED,
    EXIT_NO_ROOM,
    EXIT_UNDO_LOST,
    CaptureJob,
    CaptureProgress,
    Done,
    Failed,
    Message,
    ReadError,
    RootJob,
    decode_message,
    encode_job,
)
from ciuic.daemon.capture.process import Report, RootUnreadable
from ciuic.daemon.capture.space import CaptureRoom, NoRoom
from ciuic.errors import Busy, NotFound
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore
from ciuic.repository import Repository
from ciuic.system.urgency import Urgency
from ciuic.types import TAG_INCOMPLETE, TAG_PARTIAL, SnapshotId
from ciuic.units import human_size

SESSION = "7" * 32
COMMAND = (sys.executable, "-m", "ciuic.daemon.capture.process")
SECONDS = 60


class Stage:
    """A root with a core over it and a real repository."""

    def __init__(self, top: Path) -> None:
        self.root = top / "root"
        self.root.mkdir()
        self.repository = top / "repository"
        Repository.create(self.repository).close()
        self.backing_fd = open_backing(self.root)
        os.set_inheritable(self.backing_fd, True)
        self.core = OverlayCore(self.backing_fd, session=SESSION)

    def job(self, **changes: object) -> CaptureJob:
        """Cut, and return the job of a snapshot of that."""
        cut = self.core.cut()
        root = RootJob(
            path=os.fsencode(self.root),
            backing_fd=self.backing_fd,
            session=SESSION,
            epoch=cut.epoch,
            worker_pid=os.getpid(),
        )
        values: dict[str, object] = {
            "repository": os.fspath(self.repository),
            "id": f"cs-{cut.epoch:06x}",
            "time_ns": cut.cut_ns,
            "host": "here",
            "roots": (root,),
            "io_priority": "none",
        }
        return CaptureJob(**{**values, **changes})  # type: ignore[arg-type]

    def start(self, job: CaptureJob) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(self.backing_fd,),
        )
        assert process.stdin is not None
        process.stdin.write(encode_job(job))
        process.stdin.close()
        process.stdin = None
        return process

    def run(self, job: CaptureJob) -> tuple[int, list[Message]]:
        process = self.start(job)
        output, log = process.communicate(timeout=SECONDS)
        assert b"Traceback" not in log, log.decode()
        return process.returncode, [decode_message(line) for line in output.splitlines()]

    def snapshots(self) -> list[SnapshotId]:
        with Repository.open(self.repository) as repository:
            return repository.snapshots.ids()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.core.close()
    os.close(made.backing_fd)


def test_a_job_becomes_a_snapshot_with_everything_in_it(stage: Stage) -> None:
    """A job becomes a snapshot with tree, marks and figures, and the last line reports it."""
    make_everything(stage.root)
    job = stage.job(tags=("t",), message="m", hold=True, hold_reason="because")
    expected = manifest(stage.root)
    status, messages = stage.run(job)
    assert status == 0
    assert all(isinstance(message, CaptureProgress) for message in messages[:-1])
    done = messages[-1]
    assert isinstance(done, Done)
    assert done.modes == {os.fspath(stage.root): "full"}
    with Repository.open(stage.repository) as repository:
        snapshot = repository.snapshots.load(SnapshotId(job.id))
        assert (snapshot.tags, snapshot.message, snapshot.held, snapshot.hold_reason) == (
            ("t",),
            "m",
            True,
            "because",
        )
        assert (snapshot.time_ns, snapshot.new_bytes) == (job.time_ns, done.new_bytes)
        found = snapshot_manifest(repository.trees, partial(read_file, repository), snapshot.roots[0])
    assert_same(expected, found)
    stage.core.committed(job.roots[0].epoch)
    status, messages = stage.run(stage.job())
    done = messages[-1]
    assert isinstance(done, Done)
    assert (done.entries, done.files_read, done.new_bytes, done.modes) == (
        0,
        0,
        0,
        {os.fspath(stage.root): "tracked"},
    )


def test_several_roots_are_one_snapshot(stage: Stage, tmp_path: Path) -> None:
    """A root that cannot be captured is left out of the common snapshot, which names it."""
    (stage.root / "file").write_text("x")
    other = tmp_path / "other"
    other.mkdir()
    job = stage.job()
    both = (job.roots[0], RootJob(path=os.fsencode(other)))
    status, _ = stage.run(stage.job(id="cs-0000aa", roots=(both[0], RootJob(path=b"/nonexistent/root"))))
    assert (status, stage.snapshots()) == (0, ["cs-0000aa"])
    with Repository.open(stage.repository) as repository:
        partial = repository.snapshots.load(SnapshotId("cs-0000aa"))
    assert [root.path for root in partial.roots] == [os.fsencode(stage.root)]
    assert [root.path for root in partial.left_out] == [b"/nonexistent/root"]
    assert partial.tags == (TAG_PARTIAL,)
    assert "/nonexistent/root" in partial.message
    status, messages = stage.run(stage.job(id="cs-0000bb", roots=both))
    assert status == 0
    done = messages[-1]
    assert isinstance(done, Done)
    assert done.modes == {os.fspath(stage.root): "full", os.fspath(other): "offline"}


def test_a_root_with_a_path_that_is_not_utf8_is_captured(stage: Stage, tmp_path: Path) -> None:
    """A root whose path is not UTF-8 is captured, and errors about it can be reported."""
    odd = os.fsencode(tmp_path) + b"/odd \xff"
    missing = failed(stage.run(stage.job(roots=(RootJob(path=odd),))))
    assert "odd \\xff" in missing.error
    os.mkdir(odd)
    status, messages = stage.run(stage.job(roots=(RootJob(path=odd),)))
    assert status == 0
    done = messages[-1]
    assert isinstance(done, Done)
    assert list(done.modes) == [f"{tmp_path}/odd \\xff"]


def failed(result: tuple[int, list[Message]]) -> Failed:
    status, messages = result
    last = messages[-1]
    assert isinstance(last, Failed)
    assert last.code == status
    return last


def test_each_failure_has_its_status_and_commits_nothing(stage: Stage) -> None:
    """A busy, missing, ended or impossible target has its own exit status, and nothing is committed."""
    with Repository.open(stage.repository) as repository, repository.writer(command="a test"):
        assert failed(stage.run(stage.job())).code == Busy.exit_code
    assert failed(stage.run(stage.job(repository="/nonexistent/repository"))).code == NotFound.exit_code
    job = stage.job()
    stage.core.abort(job.roots[0].epoch)
    assert failed(stage.run(job)).code == EXIT_UNDO_LOST
    assert failed(stage.run(stage.job(id="not an id"))).code == 1
    assert stage.snapshots() == []


def test_something_that_is_no_job_is_wrong_usage(stage: Stage) -> None:
    """Input that is no job, or half a job, is wrong usage."""
    for text in (b"", b"{}", encode_job(stage.job())[:-5]):
        process = subprocess.run(COMMAND, input=text, capture_output=True, timeout=SECONDS)
        last = decode_message(process.stdout.splitlines()[-1])
        assert isinstance(last, Failed)
        assert process.returncode == last.code == 2


def test_sigterm_ends_it_between_two_steps(stage: Stage) -> None:
    """SIGTERM while waiting for the repository gives status 130 without commit; the job works afterwards."""
    job = stage.job(lock_wait_seconds=600, io_priority="idle", urgency=Urgency(min_share=0.01))
    with Repository.open(stage.repository) as repository, repository.writer(command="a test"):
        process = stage.start(job)
        until("its signal handler", lambda: catches(process.pid, signal.SIGTERM), SECONDS)
        until("its nice value", lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == 19, SECONDS)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == EXIT_INTERRUPTED
    assert decode_message(output.splitlines()[-1]) == Failed(
        error="interrupted; nothing was committed", code=EXIT_INTERRUPTED
    )
    assert stage.snapshots() == []
    assert stage.run(job)[0] == 0


def catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    return bool(mask >> (number - 1) & 1)


def test_sigkill_leaves_the_repository_as_it_was(stage: Stage) -> None:
    """A capture killed while it stores leaves the earlier snapshot whole, and its job can be run again."""
    (stage.root / "first").write_bytes(os.urandom(100_000))
    job = stage.job()
    assert stage.run(job)[0] == 0
    stage.core.committed(job.roots[0].epoch)
    handle = stage.core.names.create(ROOT_ID, b"large", 0o644, os.O_RDWR, Credentials(0, 0))[1]
    for at in range(0, 64 << 20, 1 << 20):
        stage.core.files.write(handle, at, os.urandom(1 << 20))
    stage.core.files.release(handle)
    job = stage.job()
    expected = manifest(stage.root)
    before = stored_bytes(stage)
    process = stage.start(job)
    until(
        "the first stored bytes", lambda: stored_bytes(stage) > before or process.poll() is not None, SECONDS
    )
    process.kill()
    process.communicate(timeout=SECONDS)
    if process.returncode == -signal.SIGKILL:
        assert len(stage.snapshots()) == 1
        assert stage.run(job)[0] == 0
    with Repository.open(stage.repository) as repository:
        assert len(repository.snapshots.ids()) == 2
        root = repository.snapshots.load(SnapshotId(job.id)).roots[0]
        found = snapshot_manifest(repository.trees, partial(read_file, repository), root)
    assert_same(expected, found)


def stored_bytes(stage: Stage) -> int:
    return sum(path.stat().st_size for path in (stage.repository / "packs").rglob("*") if path.is_file())


def test_capture_commits_without_its_daemon(stage: Stage) -> None:
    """A capture whose output has lost its reader still commits."""
    (stage.root / "file").write_text("x")
    job = stage.job()
    process = stage.start(job)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert stage.snapshots() == [job.id]


def test_offline_from_its_options(stage: Stage) -> None:
    """A safety snapshot without daemon prints its id last and refuses relative paths of other roots."""
    (stage.root / "file").write_bytes(b"x" * 300_000)
    (stage.root / "left out.tmp").write_bytes(b"x")
    options = ("--offline", "--repo", os.fspath(stage.repository), "--root", os.fspath(stage.root))
    arguments = (*options, "--tag", "safety", "-m", "before a restore", "--exclude", "*.tmp")
    process = subprocess.run((*COMMAND, *arguments), capture_output=True, timeout=SECONDS)
    done = decode_message(process.stdout.splitlines()[-1])
    assert isinstance(done, Done)
    with Repository.open(stage.repository) as repository:
        snapshot = repository.snapshots.load(SnapshotId(done.id))
        assert (snapshot.tags, snapshot.message, snapshot.roots[0].mode) == (
            ("safety",),
            "before a restore",
            "offline",
        )
        entries = {entry.name for entry in repository.trees.entries(snapshot.roots[0].entry.content)}
    assert entries == {b"file"}
    wrong = subprocess.run(
        (*COMMAND, "--offline", "--repo", stage.repository, "--root", "relative"), capture_output=True
    )
    assert wrong.returncode == 2


def test_tag_and_message_of_an_incomplete_snapshot_name_missing_files(stage: Stage) -> None:
    """The tag and message of an incomplete snapshot name what is missing."""
    (stage.root / "file").write_text("x")
    report = Report(lambda _: None)
    report.root = b"/data"
    for name in (b"one", b"two\xff", b"three", b"four", b"five"):
        report.failed(name, OSError(errno.EIO, "Input/output error"))
    done = capture.run_job(stage.job(message="hourly", tags=("auto",)), report)
    assert done.errors[0] == ReadError(root=b"/data", path=b"one", error="Input/output error")
    assert done.errors_total == 5
    with Repository.open(stage.repository) as repository:
        snapshot = repository.snapshots.load(SnapshotId(done.id))
    assert snapshot.tags == ("auto", TAG_INCOMPLETE)
    assert snapshot.message == "hourly [not readable: /data/one, /data/two\\xff, /data/three and 2 more]"


def test_root_that_does_not_fit_is_left_out(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root that does not fit is left out with the reason; alone it fails, and nothing of it is kept."""
    mib = 1 << 20
    capacity, packs = 64 * mib, Path(stage.job().repository) / "packs"

    def available(_: object) -> int:
        return capacity - sum(path.stat().st_size for path in packs.iterdir())

    monkeypatch.setattr("ciuic.daemon.capture.space.available_bytes", available)
    monkeypatch.setattr("ciuic.daemon.capture.space.total_bytes", lambda _: capacity)
    monkeypatch.setattr("ciuic.daemon.capture.space.can_share", lambda _: False)
    (stage.root / "small").write_bytes(os.urandom(mib))
    large = stage.root.with_name("large")
    large.mkdir()
    for number in range(6):
        (large / str(number)).write_bytes(os.urandom(16 * mib))
    both = tuple(RootJob(path=os.fsencode(path)) for path in (stage.root, large))
    done = capture.run_job(stage.job(roots=both, reserve_bytes=4 * mib), Report(lambda _: None))
    assert [root.path for root in done.left_out] == [os.fsencode(large)]
    assert "takes at least" in done.left_out[0].reason
    before = available(None)
    alone = stage.job(id="cs-000003", roots=both[1:], reserve_bytes=4 * mib)
    with pytest.raises(NoRoom, match="takes at least"):
        capture.run_job(alone, Report(lambda _: None))
    assert available(None) == before
    (large / "copies").mkdir()
    # These are blocks of one file, so they are stored once.
    for number in range(1, 6):
        (large / str(number)).write_bytes((large / "0").read_bytes())
    capture.run_job(alone, Report(lambda _: None))


def test_a_full_repository_fails_with_a_hint(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC while storing is an error of the repository with a hint, never a file left out."""
    (stage.root / "file").write_bytes(hashlib.sha256(b"x").digest() * 10_000)
    job = stage.job()

    def full(*_: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ciuic.repository.writing.writer.Writer.put_chunks", full)
    with pytest.raises(NoRoom, match="No space") as caught:
        capture.run_job(job, Report(lambda _: None))
    reported = capture.failure(caught.value, job.repository)
    assert "No space left on device" in reported.error
    assert job.repository in reported.error
    assert "[repository] path" in reported.hint
    assert reported.code == EXIT_NO_ROOM
    assert stage.snapshots() == []


def test_a_root_of_which_nothing_can_be_read_is_no_snapshot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every file fails with EIO the job fails and names why; nothing is committed."""
    (stage.root / "file").write_text("x")
    job = stage.job()

    def pread(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(content.os, "pread", pread)
    with pytest.raises(RootUnreadable, match=r"could be read: 1 name failed: Input/output error"):
        capture.run_job(job, Report(lambda _: None))
    monkeypatch.undo()
    assert stage.snapshots() == []


MIB = 1 << 20


@pytest.mark.parametrize("full", [False, True])
def test_the_need_begins_with_the_write_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A capture that the reserve ends needs more than was free without the reserve, and something is to be freed."""
    capacity, reserve = (0 if full else 32 * MIB), 8 * MIB
    with Repository.create(tmp_path / "repo") as made:
        available = lambda path: capacity - made.stored_bytes()  # noqa: E731
        monkeypatch.setattr(space, "available_bytes", available)
        monkeypatch.setattr(space, "total_bytes", lambda path: 64 * MIB)
        monkeypatch.setattr(space, "available_bytes", available)
        job = CaptureJob(
            repository=str(made.path), id="cs-abc123", time_ns=1, host="h", roots=(), reserve_bytes=reserve
        )
        room = CaptureRoom(job)
        with Repository.open(made.path, disk=room.disk) as opened, opened.writer() as writer:
            with pytest.raises(OSError, match="No space left") as refused:
                store(writer, {b"file": random.Random(1).randbytes(48 * MIB)}, number=1)
            failure = room.failed(refused.value, writer)
    assert isinstance(failure, NoRoom)
    assert room.disk.refused is not None
    needed = failure.needed_bytes + room.disk.refused.wanted_bytes + room.disk.margin_bytes
    missing = needed - (capacity - reserve)
    assert missing > 0
    assert f"it needs more than {human_size(needed)}" in str(failure)
    assert f"free at least {human_size(missing)} there" in failure.hint
