"""Attacker: the owner of a root who tries to use up a capture's memory, time or, with a disk quota, space."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.capture_bench import Bench
from support.deep_trees import contents, levels_below, make_chain, remove_chain
from support.overlay import Overlay
from support.restoring import take
from support.second_user import MADE_UP
from support.site import CHECKOUT

from ciuic.compare.diff import diff_live, diff_snapshots
from ciuic.daemon.capture import process as capture_roots
from ciuic.daemon.capture import walk
from ciuic.daemon.capture.job import CaptureJob, Done, RootJob, decode_message, encode_job
from ciuic.daemon.capture.process import Report, run_job
from ciuic.daemon.capture.walk import MAX_DEPTH
from ciuic.fuse_layer.core.overlay_core import ROOT_ID
from ciuic.maintenance.prune import prune
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository
from ciuic.repository.lookup import find
from ciuic.restore import execute, plan_restore
from ciuic.retention import RetentionPolicy
from ciuic.types import TAG_INCOMPLETE, TAG_PARTIAL, Snapshot, SnapshotId

LONG = b"d" * 250
HOSTILE_LEVELS = 4000
"""Levels of the chain, for which a capture with full paths took 3.3 GB."""
MAX_RSS_KIB = 300 << 10
_MEASURED = """
import sys
from pathlib import Path
from ciuic.{module} import main
status = main({arguments!r})
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line for line in lines if line.startswith("VmHWM")).split()[1], file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repository") as made:
        yield made


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """Provide a directory for chains, which ordinary tools could not remove."""
    top = tmp_path / "deep"
    top.mkdir()
    yield top
    for place in (top, *top.iterdir()):
        if place.is_dir():
            remove_chain(place, LONG)


def make_chain_as_its_owner(top: Path, levels: int, files: int = 0) -> None:
    """Make the chain as another user, who owns the top."""
    os.chown(top, MADE_UP.uid, MADE_UP.gid)
    child = os.fork()
    if not child:
        try:
            # The directories above belong to root.
            os.chdir(top)
            os.setgroups([])
            os.setresgid(*[MADE_UP.gid] * 3)
            os.setresuid(*[MADE_UP.uid] * 3)
            make_chain(Path(), levels, LONG, files=files)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def measured_capture(repository: Repository, *roots: Path) -> tuple[Done, int]:
    """Capture in a process of its own; return the snapshot and the peak memory in KiB."""
    job = CaptureJob(
        repository=str(repository.path),
        id=str(repository.snapshots.new_id()),
        time_ns=1,
        host="h",
        roots=tuple(RootJob(path=os.fsencode(root)) for root in roots),
        io_priority="none",
    )
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED.format(module="daemon.capture.process", arguments=[])],
        input=encode_job(job),
        capture_output=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    last = decode_message(done.stdout.splitlines()[-1])
    assert isinstance(last, Done)
    return last, int(done.stderr.split()[-1])


def loaded(repository: Repository, id_: str) -> Snapshot:
    with Repository.open(repository.path) as fresh:
        return fresh.snapshots.load(SnapshotId(id_))


def test_a_chain_of_thousands_of_levels_costs_no_other_root_its_snapshot(
    repository: Repository, deep: Path, tmp_path: Path
) -> None:
    """A capture of a chain of thousands of levels has bounded memory and names what it cannot read.

    The other root restores exactly, and its next capture is not forced to compare everything.
    """
    hostile, other = deep / "hostile", tmp_path / "other"
    hostile.mkdir()
    make_chain_as_its_owner(hostile, HOSTILE_LEVELS)
    (hostile / "file").write_bytes(b"x")
    (other / "a").mkdir(parents=True)
    (other / "a" / "file").write_bytes(b"content" * 1000)
    done, rss_kib = measured_capture(repository, hostile, other)
    assert rss_kib < MAX_RSS_KIB
    snapshot = loaded(repository, done.id)
    assert [root.path for root in snapshot.roots] == [os.fsencode(hostile), os.fsencode(other)]
    assert snapshot.left_out == ()
    (error,) = done.errors
    assert f"{MAX_DEPTH} levels" in error.error
    assert error.path.endswith(LONG)
    assert len(error.path) < 2 * 4096
    assert TAG_INCOMPLETE in snapshot.tags
    assert snapshot.incomplete == (os.fsencode(hostile),)
    assert [root.depth for root in snapshot.roots] == [MAX_DEPTH, 1]
    with Repository.open(repository.path) as fresh:
        execute(plan_restore(fresh, snapshot, [os.fsencode(other)], os.fsencode(tmp_path / "back")))
    assert (tmp_path / "back" / "other" / "a" / "file").read_bytes() == b"content" * 1000


def test_wide_levels_of_a_deep_chain_cost_bounded_memory(
    repository: Repository, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and entries of all levels of a deep, wide chain share one memory budget.

    Beyond it names wait in a file and entries are written early.
    """
    make_chain(deep, 100, LONG, files=30)
    at_ease = take(repository, deep)
    monkeypatch.setattr(walk, "MAX_NAMES_BYTES", 20_000)
    monkeypatch.setattr(walk, "MAX_PENDING_BYTES", 20_000)
    monkeypatch.setattr(walk, "STREAMS_HELD", 5)
    held: list[int] = []
    real = walk.Directory.put

    def put(self: walk.Directory, name: bytes, entry: object) -> None:
        held.append(len(self.pending))
        real(self, name, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(walk.Directory, "put", put)
    short = take(repository, deep)
    assert short.roots[0].entry == at_ease.roots[0].entry
    assert held


@pytest.mark.full
def test_the_deepest_tree_that_is_captured_is_restored_verified_and_compared(
    repository: Repository, deep: Path, tmp_path: Path
) -> None:
    """The deepest captured tree is restored, verified and compared without recursion or quadratic memory."""
    root = deep / "root"
    root.mkdir()
    make_chain(root, MAX_DEPTH, LONG, files=1)
    first = take(repository, root)
    assert first.tags == ()
    assert first.roots[0].depth == MAX_DEPTH
    os.rename(root / os.fsdecode(LONG), root / "moved")
    os.rename(root / "moved", root / os.fsdecode(LONG))
    second = take(repository, root)
    with Repository.open(repository.path) as fresh:
        assert not verify_snapshots(fresh, None, checksum=True).damages
        assert list(diff_snapshots(fresh, first, second)) == []
        assert list(diff_live(fresh, second)) == []
        target = deep / "back"
        target.mkdir()
        result = execute(plan_restore(fresh, second, [os.fsencode(root)], os.fsencode(target)))
        assert result.failed == []
        path = os.fsencode(root) + (b"/" + LONG) * MAX_DEPTH
        assert find(fresh, second, path).entry.is_dir
    assert levels_below(target / "root", LONG) == MAX_DEPTH
    assert list(contents(target / "root", LONG)) == list(contents(root, LONG))
    remove_chain(target / "root", LONG)


def test_a_root_that_takes_all_memory_is_left_out(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root whose capture raises MemoryError is left out, and the next root is captured.

    The next capture's base for the missing root is the last snapshot that has it.
    """
    roots = [tmp_path / name for name in ("greedy", "modest")]
    for root in roots:
        root.mkdir()
        (root / "file").write_bytes(b"x" * 5000)
    complete = take(repository, *roots)
    real = capture_roots.capture_root

    def capture_root(job: RootJob, *rest: object) -> object:
        if job.path == os.fsencode(roots[0]):
            raise MemoryError
        return real(job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(capture_roots, "capture_root", capture_root)
    partial = take(repository, *roots)
    assert [root.path for root in partial.roots] == [os.fsencode(roots[1])]
    assert [(root.path, "memory" in root.reason) for root in partial.left_out] == [
        (os.fsencode(roots[0]), True)
    ]
    assert TAG_PARTIAL in partial.tags
    monkeypatch.undo()
    again = take(repository, *roots)
    assert again.parent in (complete.id, partial.id)
    assert again.left_out == ()


def test_the_memory_limit_is_a_limit(tmp_path: Path) -> None:
    """An allocation beyond the memory limit raises MemoryError in the capture."""
    script = (
        "from ciuic.daemon.capture.process import limit_memory\n"
        "limit_memory(200 << 20)\n"
        "try:\n    bytearray(400 << 20)\nexcept MemoryError:\n    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "refused\n"


def test_moves_do_not_make_snapshots_deeper_than_the_limit(tmp_path: Path) -> None:
    """A chain moved below the end of another is examined although tracking would skip it."""
    rig = Bench(tmp_path)
    limit = 60
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(walk, "depth_limit", lambda: limit)
            make_chain(rig.backing, limit - 10, b"a")
            make_chain(rig.backing, limit - 10, b"b")
            record, report = rig.snapshot()
            assert (record.depth, report.errors) == (limit - 10, [])
            end = ROOT_ID
            for _ in range(limit - 10):
                end = rig.core.names.lookup(end, b"a").node
            rig.core.names.rename(ROOT_ID, b"b", end, b"b", 0)
            record, report = rig.capture(rig.cut(observe=False))
            assert record.mode == "tracked"
            assert record.depth == limit
            assert len(report.errors) == 1
    finally:
        rig.close()


def test_retention_keeps_the_last_snapshot_of_a_root_that_newer_ones_lack(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention keeps the last good snapshot of a root that newer ones lack, against every other rule."""
    roots = [tmp_path / name for name in ("broken", "good")]
    for root in roots:
        root.mkdir()
        (root / "file").write_text(root.name)
    day_ns = 86_400 * 10**9
    taken = []
    for day in range(8):
        (roots[1] / "file").write_text(str(day))
        present = roots if day < 2 else [tmp_path / "gone", roots[1]]
        job = CaptureJob(
            repository=str(repository.path),
            id=str(repository.snapshots.new_id()),
            time_ns=(day + 1) * day_ns,
            host="h",
            roots=tuple(RootJob(path=os.fsencode(root)) for root in present),
        )
        if day >= 2:
            broken = msgspec.structs.replace(job.roots[0], path=os.fsencode(roots[0]))
            job = msgspec.structs.replace(job, roots=(broken, job.roots[1]))
            roots[0].rename(tmp_path / "aside") if roots[0].exists() else None
        taken.append(run_job(job, Report(lambda _: None)).id)
    policy = RetentionPolicy(keep_within_seconds=0, keep_last=1, keep_emergency=0)
    with Repository.open(repository.path) as fresh:
        report = prune(fresh, policy, now_ns=400 * day_ns)
        kept = {str(decision.id): decision.reasons for decision in report.plan.kept}
        assert set(kept) == {taken[1], taken[7]}
        assert any("newest with" in reason for reason in kept[taken[1]])
        execute(
            plan_restore(
                fresh, loaded(repository, taken[1]), [os.fsencode(roots[0])], os.fsencode(tmp_path / "back")
            )
        )
    assert (tmp_path / "back" / "broken" / "file").read_text() == "broken"


def test_a_file_system_of_the_owner_that_never_answers_is_left_out(tmp_path: Path) -> None:
    """A capture names and skips a file system in the root, of the owner's, that never answers."""
    root, store = tmp_path / "root", tmp_path / "repository"
    (root / "served").mkdir(parents=True)
    (root / "file").write_text("content")
    Repository.create(store, block_size=4096).close()
    fuse = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse},rootmode=40000,user_id=54321,group_id=54321,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"evil", os.fsencode(root / "served"), b"fuse.evil", 0, options.encode()) == 0
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ciuic.daemon.capture.process", "--offline", "--repo", str(store), "--root", str(root)],
            capture_output=True, text=True, check=False, timeout=100, cwd="/",
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )  # fmt: skip
    finally:
        # The connection ends, so that waiting calls get an answer.
        os.close(fuse)
        libc.umount2(os.fsencode(root / "served"), 2)
    assert done.returncode == 0, done.stderr
    with Repository.open(store) as repository:
        (listed,) = repository.snapshots.list()
        snapshot = repository.snapshots.load(listed.id)
        names = [entry.name for entry in repository.trees.entries(snapshot.roots[0].entry.content)]
    assert names == [b"file"]
    assert "FUSE file system is mounted here" in done.stdout + done.stderr


MIB = 1 << 20


@pytest.mark.mount
def test_copies_of_old_blocks_leave_others_half_of_the_free_space(short_tmp: Path) -> None:
    """A snapshot is abandoned before its copies of old blocks leave less than a quarter of the free space.

    With 50 MiB overwritten and 46 MiB free, the job gets no error and all space is free again.
    """
    disk = short_tmp / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", disk], check=True)
    root = disk / "root"
    root.mkdir()
    os.chown(root, MADE_UP.uid, MADE_UP.gid)
    (root / "file").write_bytes(bytes(os.urandom(MIB)) * 50)

    def free() -> int:
        room = os.statvfs(disk)
        return room.f_bavail * room.f_frsize

    before = least = free()
    with Overlay(root, short_tmp / "w.sock") as overlay:
        overlay.client.cut()
        with open(root / "file", "r+b", buffering=0) as file:
            for _ in range(50):
                file.write(b"new!" * (MIB // 4))
                os.fsync(file.fileno())
                least = min(least, free())
        (given_up,) = overlay.client.status().abandoned
        assert "than the file system has left" in given_up.reason
        assert least > before // 4
        assert free() > before - MIB
        assert (root / "file").read_bytes()[: 50 * MIB] == b"new!" * (50 * MIB // 4)
