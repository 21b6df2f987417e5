"""Restores in place on file systems that share extents: the worker shares, and cuts stay exact."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.capture_bench import snapshot_manifest
from support.ci import needs
from support.extents import overlap_bytes, shared_extents
from support.live import Live
from support.overlay import ASKED_FOR, Overlay, overlay_over
from support.small_disks import missing, small_disk
from support.stored import read_file
from support.trees import Manifest, assert_same, manifest

from ciuic.daemon.capture.job import CaptureJob, Done, RootJob, decode_message, encode_job
from ciuic.protocol.worker_client import WorkerRefused
from ciuic.protocol.worker_frames import Share, worker_socket
from ciuic.repository import Repository
from ciuic.restore import Overwrite, Result, content, execute, plan_restore
from ciuic.restore.content import OverlaySharing as Way
from ciuic.restore.content import find
from ciuic.types import SnapshotId

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(ASKED_FOR == "pyfuse3", reason="only the kernel driver shares"),
]
_MIB = 1 << 20
_BLOCK = 256 << 10
_SECONDS = 60


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    needs(missing(request.param))
    with small_disk(tmp_path_factory.mktemp("disk"), request.param) as point:
        yield point


class Site:
    """A root on a disk that shares extents, its overlay and a repository beside it."""

    def __init__(self, disk: Path, overlay: Overlay, runtime_dir: Path) -> None:
        self.root, self.store, self.overlay = disk / "root", disk / "repository", overlay
        self.runtime_dir = runtime_dir

    def cut(self) -> CaptureJob:
        cut, status = self.overlay.client.cut(), self.overlay.client.status()
        root = RootJob(
            path=os.fsencode(self.root),
            backing_fd=self.overlay.backing_fd,
            session=status.session,
            epoch=cut.epoch,
            worker_pid=self.overlay.process.pid,
        )
        return CaptureJob(
            repository=os.fspath(self.store),
            id=f"cs-{cut.epoch:06x}",
            time_ns=cut.cut_ns,
            host="h",
            roots=(root,),
        )

    def capture(self, job: CaptureJob) -> Manifest:
        """Capture a cut; return what the snapshot has."""
        process = subprocess.run(
            [sys.executable, "-m", "ciuic.daemon.capture.process"],
            input=encode_job(job),
            stdout=subprocess.PIPE,
            pass_fds=(self.overlay.backing_fd,),
            timeout=_SECONDS,
            check=False,
        )
        done = decode_message(process.stdout.splitlines()[-1])
        assert isinstance(done, Done), done
        assert done.errors == ()
        self.overlay.client.committed(job.roots[0].epoch)
        with Repository.open(self.store) as repository:
            record = repository.snapshots.load(SnapshotId(job.id)).roots[0]
            return snapshot_manifest(repository.trees, partial(read_file, repository), record)

    def restore(self, job: CaptureJob, runtime_dir: Path | None = None) -> Result:
        with Repository.open(self.store) as repository:
            snapshot = repository.snapshots.load(SnapshotId(job.id))
            plan = plan_restore(
                repository, snapshot, [os.fsencode(self.root)], overwrite=Overwrite.ALWAYS, delete=True
            )
            return execute(plan, runtime_dir=runtime_dir or self.runtime_dir)

    def shared_bytes(self, name: str) -> int:
        """Return how many of the file's bytes share extents with packs."""
        packs = [extent for pack in (self.store / "packs").iterdir() for extent in shared_extents(pack)]
        return overlap_bytes(packs, shared_extents(self.overlay.backing / name))


@pytest.fixture
def site(disk: Path, short_tmp: Path) -> Iterator[Site]:
    root = disk / "root"
    root.mkdir()
    Repository.create(disk / "repository", block_size=_BLOCK).close()
    with overlay_over(root, worker_socket(short_tmp, root), block_size=_BLOCK) as overlay:
        (root / "large").write_bytes(os.urandom(12 * _MIB + 5000))
        (root / "middle").write_bytes(os.urandom(3 * _BLOCK + 70_001))
        (root / "small").write_bytes(os.urandom(3000))
        (root / "text").write_bytes(b"step 1000 loss 0.125\n" * 100_000)
        (root / "hole").write_bytes(os.urandom(_BLOCK))
        os.truncate(root / "hole", 9 * _MIB)
        os.setxattr(root / "large", "user.note", b"kept")
        os.chmod(root / "middle", 0o640)
        os.chown(root / "middle", 12, 34)
        yield Site(disk, overlay, short_tmp)
    shutil.rmtree(root)
    shutil.rmtree(disk / "repository")
    # Space is given back by btrfs with a transaction.
    os.sync()


def _damage(root: Path) -> None:
    (root / "large").write_bytes(os.urandom(11 * _MIB))
    (root / "middle").unlink()
    with (root / "text").open("r+b") as file:
        file.seek(50_000)
        file.write(b"torn")


def test_extents_come_back_and_every_cut_stays_exact(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts before and during the restore are captured exactly; all readers see the new content at once."""
    first = site.cut()
    wanted = manifest(site.root)
    assert_same(wanted, site.capture(first))
    _damage(site.root)
    damaged = manifest(site.root)
    before = site.cut()
    during: list[CaptureJob] = []
    real = Way.share

    def share(self: Way, *where: int) -> bool:
        shared = real(self, *where)
        if not during and where[-1] > 4096:
            during.append(site.cut())
        return shared

    monkeypatch.setattr(Way, "share", share)
    with (site.root / "large").open("rb") as old:
        was = old.read()
        view = mmap.mmap(old.fileno(), 0, access=mmap.ACCESS_READ)
        result = site.restore(first)
        assert result.complete, result.error()
        assert_same(wanted, manifest(site.root))
        assert view[:] == was
        old.seek(0)
        assert old.read() == was
        view.close()
    for name in ("large", "middle"):
        with (site.overlay.backing / name).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert_same(wanted, manifest(site.root))
    assert site.shared_bytes("large") >= 12 * _MIB
    assert site.shared_bytes("middle") >= 3 * _BLOCK
    assert (site.overlay.backing / "hole").stat().st_blocks * 512 <= _BLOCK + 65536
    after = site.cut()
    assert_same(damaged, site.capture(before))
    partial = {name: facts for name, facts in site.capture(during[0]).items() if b".ciuic-" not in name}
    assert all(
        facts in (wanted.get(name), damaged.get(name)) for name, facts in partial.items() if name != b"."
    )
    assert_same(wanted, site.capture(after))
    with Repository.open(site.store) as repository:
        assert list(repository.scrub()) == []


def test_cached_pages_of_the_shared_range_are_dropped(site: Site) -> None:
    """Pages of the range that the kernel cached or mapped show the new content after the request."""
    sharing = find(os.stat(site.root).st_dev, site.runtime_dir)
    assert sharing is not None
    new = os.urandom(_MIB)
    (site.root.parent / "source").write_bytes(new)
    source = os.open(site.root.parent / "source", os.O_RDONLY)
    os.fsync(source)
    fd = os.open(site.root / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, _MIB + 10)
        view = mmap.mmap(fd, _MIB)
        assert view[:] == bytes(_MIB) == os.pread(fd, _MIB, 0)
        assert sharing.share(source, 0, fd, 0, _MIB)
        assert os.pread(fd, _MIB + 20, 0) == new + bytes(10)
        assert view[:] == new
        view[5000:5003] = b"own"
        view.flush()
        view.close()
        assert (site.overlay.backing / "new").read_bytes()[4096:8192] == new[4096:5000] + b"own" + new[
            5003:8192
        ]
        assert os.pread(source, _MIB, 0) == new
    finally:
        os.close(fd)
        os.close(source)
        (site.root.parent / "source").unlink()
        sharing.close()


def test_the_worker_refuses_invalid_share_requests(site: Site) -> None:
    """The worker refuses invalid requests to share.

    A file of another mount, one without writer, an unreadable source, ranges beyond the end, and two
    descriptors.
    """
    client, device = site.overlay.client, os.stat(site.root).st_dev
    own = f"{os.major(device)}:{os.minor(device)}"
    with (site.root / "new").open("wb") as file, (site.root.parent / "source").open("wb+") as source:
        source.write(bytes(_MIB))
        source.flush()
        file.truncate(_MIB)
        node = os.fstat(file.fileno()).st_ino

        def errno_of(fd: int, **changed: Any) -> int | None:
            wanted = {"device": own, "node": node, "source_offset": 0, "offset": 0, "length": _MIB, **changed}
            with pytest.raises(WorkerRefused) as refused:
                client.share(Share(**wanted), fd)
            return refused.value.errno

        source_fd = source.fileno()
        write_only = os.open(source.name, os.O_WRONLY)
        assert errno_of(source_fd, device="0:1") == 116  # ESTALE
        assert errno_of(source_fd, node=os.stat(site.root / "large").st_ino) == 9  # EBADF
        assert errno_of(source_fd, node=1 << 40) is not None
        assert errno_of(write_only) == 9
        assert errno_of(source_fd, length=2 * _MIB) == 22  # EINVAL
        assert errno_of(source_fd, length=0) == 22
        assert errno_of(source_fd, offset=1 << 61, length=1 << 61) == 22
        os.close(write_only)
        client.share(Share(device=own, node=node, source_offset=0, offset=0, length=_MIB), source_fd)
    (site.root.parent / "source").unlink()
    assert len(os.listdir(f"/proc/{site.overlay.process.pid}/fd")) < 40


def test_without_it_everything_is_written(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no worker is found, or it begins to refuse, a restore has the same content, and every byte is written from then on."""
    first = site.cut()
    wanted = manifest(site.root)
    site.capture(first)
    left, real = iter([True] * 3), content.Sharing.share
    for runtime_dir in (site.runtime_dir / "nowhere", None):
        _damage(site.root)
        if runtime_dir is None:
            monkeypatch.setattr(
                content.Sharing, "share", lambda self, *where: next(left, False) and real(self, *where)
            )
        assert site.restore(first, runtime_dir).complete
        assert_same(wanted, manifest(site.root))
        assert site.shared_bytes("large") < 12 * _MIB


def test_a_restore_over_a_protected_root_shares_through_the_worker(disk: Path, short_tmp: Path) -> None:
    """A `ciuic restore` over a protected root finds the worker, and the safety snapshot undoes it."""
    root, store = disk / "root", disk / "repository"
    root.mkdir()
    with Live(short_tmp, repository=store) as live:
        live.run("protect", str(root))
        live.start(root)
        good, bad = os.urandom(20 * _MIB), os.urandom(19 * _MIB)
        (root / "model").write_bytes(good)
        wanted = live.snapshot("--wait")
        (root / "model").write_bytes(bad)
        live.run("restore", "-s", wanted, "-p", str(root), "--overwrite")
        assert (root / "model").read_bytes() == good
        listed = json.loads(live.run("list", "--all", "--json").stdout)["snapshots"]
        (safety,) = [one["id"] for one in listed if one["safety"]]
        live.run("restore", "-s", safety, "-p", str(root), "--overwrite", "--no-safety")
        assert (root / "model").read_bytes() == bad
        live.run("restore", "-s", wanted, "-p", str(root), "--overwrite", "--no-safety")
        assert (root / "model").read_bytes() == good
        live.run("verify", "--all", "--checksum")
    packs = [extent for pack in (store / "packs").iterdir() for extent in shared_extents(pack)]
    assert (root / "model").read_bytes() == good
    assert overlap_bytes(packs, shared_extents(root / "model")) == 20 * _MIB
    shutil.rmtree(root)
    shutil.rmtree(store)
    os.sync()
