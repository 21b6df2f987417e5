"""Common programs over training data work in a protected root, also while snapshots are taken."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.late_modules import skipped_without
from support.live import Live, emptied_root
from support.trees import assert_same, make_everything, manifest
from support.warm_python import WarmPython

pytestmark = pytest.mark.mount


@pytest.fixture
def root(shared: Live) -> Path:
    """Provide the root of the file's daemon, empty."""
    return emptied_root(shared)


def _run(*command: str | Path, cwd: Path) -> str:
    env = {**os.environ, "HOME": str(cwd), "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(command, cwd=cwd, env=env, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def _snapshots_meanwhile(live: Live) -> Iterator[list[str]]:
    """Take one snapshot after another while the block runs; yield the committed ids, at least one."""
    end = threading.Event()
    snapshot_ids: list[str] = []

    def keep_taking() -> None:
        while True:
            snapshot_ids.append(live.snapshot())
            if end.is_set():
                return

    thread = threading.Thread(target=keep_taking)
    thread.start()
    try:
        yield snapshot_ids
    finally:
        end.set()
        thread.join()
    assert snapshot_ids


def _restored(live: Live, snapshot: str, path: Path, into: Path) -> Path:
    live.run("restore", "-s", snapshot, "-p", str(path), "-d", str(into / snapshot))
    return into / snapshot / path.name


def test_sqlite_in_wal_mode(shared: Live, root: Path, short_tmp: Path) -> None:
    """SQLite writes during snapshots, and every snapshot holds a database that opens at a past commit."""
    (root / "db").mkdir()
    with closing(sqlite3.connect(root / "db/runs.sqlite")) as db:
        assert db.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
        db.execute("CREATE TABLE step (number INTEGER PRIMARY KEY, loss REAL, blob BLOB)")
        with _snapshots_meanwhile(shared) as snapshot_ids:
            for number in range(300):
                with db:
                    db.execute(
                        "INSERT INTO step VALUES (?, ?, ?)", (number, 1 / (number + 1), os.urandom(3000))
                    )
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    for snapshot in snapshot_ids:
        copy = _restored(shared, snapshot, root / "db", short_tmp)
        if (copy / "runs.sqlite").stat().st_size == 0:
            # The snapshot was taken before the first commit.
            continue
        with closing(sqlite3.connect(copy / "runs.sqlite")) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            count, last = db.execute("SELECT count(*), max(number) FROM step").fetchone()
            assert count == (0 if last is None else last + 1)


def test_a_git_repository_works_in_a_root(shared: Live, root: Path, short_tmp: Path) -> None:
    """A git repository in the root can be committed to, repacked and cloned; its copy passes fsck."""
    work = root / "work"
    work.mkdir()
    git = ("git", "-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    _run("git", "init", "-q", cwd=work)
    with _snapshots_meanwhile(shared):
        for number in range(8):
            for file in range(10):
                (work / f"file{file}").write_text(f"{number} {file}\n" * 200)
            _run("git", "add", "-A", cwd=work)
            _run(*git, "commit", "-q", "-m", f"commit {number}", cwd=work)
        _run("git", "gc", "-q", "--prune=now", cwd=work)
        _run("git", "clone", "-q", "--no-hardlinks", work, root / "clone", cwd=root)
    _run("git", "fsck", "--strict", cwd=work)
    snapshot = shared.snapshot()
    copy = _restored(shared, snapshot, work, short_tmp)
    _run("git", "fsck", "--strict", cwd=copy)
    assert _run("git", "status", "--porcelain", cwd=copy) == ""
    assert _run("git", "log", "--format=%H", cwd=copy) == _run(
        "git", "log", "--format=%H", cwd=root / "clone"
    )


def test_rsync_with_everything(shared: Live, root: Path, short_tmp: Path) -> None:
    """A copy by rsync -aHAX into the root loses nothing, and a copy back is the same.

    A second run finds nothing to copy.
    """
    source = short_tmp / "source"
    source.mkdir()
    make_everything(source)
    _run("rsync", "-aHAX", f"{source}/", f"{root}/in/", cwd=short_tmp)
    assert_same(manifest(source), manifest(root / "in"))
    assert _run("rsync", "-aHAXi", "--delete", f"{source}/", f"{root}/in/", cwd=short_tmp) == ""
    _run("rsync", "-aHAX", f"{root}/in/", f"{short_tmp}/out/", cwd=short_tmp)
    assert_same(manifest(source), manifest(short_tmp / "out"))


def test_tar_with_everything(shared: Live, root: Path, short_tmp: Path) -> None:
    """A tar archive made of the root and one unpacked into it hold the same tree."""
    source = short_tmp / "source"
    source.mkdir()
    make_everything(source)
    # The archive leaves sockets out.
    (source / "socket").unlink()
    flags = ("--xattrs", "--xattrs-include=*", "--acls", "--sparse", "--numeric-owner")
    # --format=posix keeps nanoseconds.
    _run("tar", *flags, "--format=posix", "-cf", short_tmp / "one.tar", "-C", source, ".", cwd=short_tmp)
    (root / "in").mkdir()
    _run("tar", *flags, "-xpf", short_tmp / "one.tar", "-C", root / "in", cwd=short_tmp)
    assert_same(manifest(source), manifest(root / "in"))
    _run("tar", *flags, "--format=posix", "-cf", short_tmp / "two.tar", "-C", root / "in", ".", cwd=short_tmp)
    (short_tmp / "out").mkdir()
    _run("tar", *flags, "-xpf", short_tmp / "two.tar", "-C", short_tmp / "out", cwd=short_tmp)
    assert_same(manifest(source), manifest(short_tmp / "out"))


def test_safetensors_are_read_back_mapped(shared: Live, root: Path, short_tmp: Path) -> None:
    """Tensors saved with safetensors are read back, mapped, from the root and from a restored copy."""
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {
        f"layer{n}": numpy.random.default_rng(n).standard_normal((512, 1024), dtype="f4") for n in range(4)
    }
    path = root / "model.safetensors"
    safetensors.save_file(tensors, path)
    snapshot = shared.snapshot()
    safetensors.save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    for copy, offset in ((path, 1), (_restored(shared, snapshot, path, short_tmp), 0)):
        loaded = safetensors.load_file(copy)
        assert all(numpy.array_equal(loaded[name], tensor + offset) for name, tensor in tensors.items())


def test_an_hdf5_file_that_grows_in_place_is_right_in_each_snapshot(
    shared: Live, root: Path, short_tmp: Path
) -> None:
    """An HDF5 file that grows in place across snapshots (chunked, resized, flushed) is right in each."""
    numpy = pytest.importorskip("numpy")
    h5py = pytest.importorskip("h5py")
    path = root / "metrics.h5"
    snapshots = {}
    with h5py.File(path, "w") as file:
        data = file.create_dataset("loss", (0, 256), maxshape=(None, 256), chunks=(64, 256), dtype="f4")
        for part in range(4):
            data.resize((part + 1) * 200, axis=0)
            data[part * 200 :] = part
            file.flush()
            snapshots[part] = shared.snapshot()
    for part, snapshot in snapshots.items():
        copy = _restored(shared, snapshot, path, short_tmp)
        # It was open for writing at the cut, and HDF5 sees the writer's own consistency flag.
        with h5py.File(copy, "r", locking=False) as file:
            expected = numpy.repeat(numpy.arange(part + 1), 200)[:, None] * numpy.ones((1, 256))
            assert numpy.array_equal(file["loss"], expected)


@skipped_without("torch")
def test_an_overwritten_torch_save_comes_back(
    shared: Live, root: Path, short_tmp: Path, plain_torch: WarmPython
) -> None:
    """A torch.save overwritten by the next one comes back from its snapshot, and loads with mmap."""
    program = """if True:
        import hashlib, pathlib, sys, torch
        path, mode, digests = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
        def digest(state):
            model, adam = state["model"], state["adam"]["state"]
            tensors = [*model.items(), *((f"{k}.{n}", v) for k, of in adam.items() for n, v in of.items())]
            return [f"{name} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}" for name, tensor in tensors]
        if mode == "save":
            # The process that this one is forked from has drawn its seed.
            torch.seed()
            model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
            adam = torch.optim.AdamW(model.parameters())
            model(torch.randn(8, 256)).sum().backward()
            adam.step()
            state = {"model": model.state_dict(), "adam": adam.state_dict()}
            torch.save(state, path)
            digests.write_text("\\n".join(digest(state)))
        else:
            for mmap in (False, True):
                assert digest(torch.load(path, mmap=mmap)) == digests.read_text().split("\\n"), f"mmap={mmap}"
    """
    path = root / "checkpoint.pt"
    first, second = short_tmp / "first", short_tmp / "second"

    def run(*arguments: str | Path) -> None:
        done = plain_torch.run(["-c", program, *arguments], cwd=short_tmp, timeout=120)
        assert done.returncode == 0, done.stderr

    run(path, "save", first)
    snapshot = shared.snapshot()
    run(path, "save", second)
    assert first.read_text() != second.read_text()
    run(path, "load", second)
    run(_restored(shared, snapshot, path, short_tmp), "load", first)
