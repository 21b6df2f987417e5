"""Restores between real directories through a real repository."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support import small_disks, trees
from support.ci import needs
from support.restoring import take, write
from support.stored import flip_stored

from ciuic.errors import CiuicError, DestinationExists, NotFound, NotPermitted, Partial, UsageError
from ciuic.repository import Repository
from ciuic.restore import Overwrite, RestoreItem, RestoreProgress, Result, execute, plan_restore
from ciuic.restore import plan as planning
from ciuic.restore.new_files import NonDirectory
from ciuic.types import (
    FLAG_MOUNTPOINT,
    FLAG_OPEN_FOR_WRITING,
    MAX_TIME_NS,
    Entry,
    RootRecord,
    Snapshot,
    SnapshotDraft,
)

ALWAYS = Overwrite.ALWAYS
NO_ID = 0xFFFFFFFF
"""Id of the entries of an ACL that name nobody, ACL_UNDEFINED_ID."""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repository", block_size=4096) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


def restore(
    repository: Repository,
    snapshot: Snapshot,
    path: Path,
    dest: Path | None = None,
    overwrite: Overwrite | None = None,
    **options: object,
) -> Result:
    where = None if dest is None else os.fsencode(dest)
    plan = plan_restore(repository, snapshot, [os.fsencode(path)], where, overwrite=overwrite, **options)  # type: ignore[arg-type]
    return execute(plan)


def complete(result: Result) -> Result:
    assert result.complete, result.error()
    return result


def leftovers(top: Path) -> list[Path]:
    # Not rglob: before Python 3.11 it stumbles over symbolic links with long targets.
    return [Path(folder, name) for folder, folders, files in os.walk(top) for name in (*folders, *files)
            if name.startswith(".ciuic-restore")]  # fmt: skip


def damage(repository: Repository, snapshot: Snapshot, name: bytes) -> None:
    """Flip a byte of the first block of a file at the top of the root."""
    entry = repository.trees.entry(snapshot.roots[0].entry.content, name)
    assert entry is not None
    ids = dict(repository.block_maps.ids(entry.content, entry.map_height, 1))
    flip_stored(repository, ids[0])


def recommit(repository: Repository, snapshot: Snapshot, changed: dict[bytes, Entry]) -> Snapshot:
    """Commit a snapshot like the given one with entries at the top of its root replaced."""
    root = snapshot.roots[0]
    with repository.writer() as writer:
        tree = writer.update_tree(root.entry.content, changed)
        entry = msgspec.structs.replace(
            root.entry, content=tree.id, total_files=tree.total_files, total_bytes=tree.total_bytes
        )
        record: RootRecord = msgspec.structs.replace(root, entry=entry)
        id_ = repository.snapshots.new_id()
        return writer.commit(SnapshotDraft(id=id_, time_ns=1, host="here", roots=(record,)))


# Content


def test_everything_comes_back_elsewhere(repository: Repository, root: Path, tmp_path: Path) -> None:
    """Bytes, modes, owners, times, xattrs, ACLs, links, devices, holes, odd names and depth are restored."""
    trees.make_everything(root)
    expected = trees.manifest(root)
    snapshot = take(repository, root)
    result = complete(restore(repository, snapshot, root, tmp_path / "out"))
    trees.assert_same(expected, trees.manifest(tmp_path / "out" / "root"))
    assert not leftovers(tmp_path / "out")
    assert result.restored == sum(not stat.S_ISDIR(facts.kind) for facts in expected.values())


def test_everything_comes_back_in_place_from_nothing(repository: Repository, root: Path) -> None:
    """A root that is gone altogether is made again exactly."""
    trees.make_everything(root)
    expected = trees.manifest(root)
    snapshot = take(repository, root)
    shutil.rmtree(root)
    complete(restore(repository, snapshot, root))
    trees.assert_same(expected, trees.manifest(root))


def test_one_file_goes_into_a_directory_that_is_made(
    repository: Repository, root: Path, tmp_path: Path
) -> None:
    """PATH is restored as DEST/basename(PATH), and DEST is made."""
    write(root / "dir" / "file", b"content")
    snapshot = take(repository, root)
    complete(restore(repository, snapshot, root / "dir" / "file", tmp_path / "new" / "er"))
    assert (tmp_path / "new" / "er" / "file").read_bytes() == b"content"
    assert os.listdir(tmp_path / "new" / "er") == ["file"]


def test_directories_on_the_way_come_back_as_they_were(repository: Repository, root: Path) -> None:
    """Missing parents get mode and time of the snapshot in place, without their other children."""
    write(root / "a" / "b" / "file", b"content")
    write(root / "a" / "other", b"")
    os.chmod(root / "a", 0o711)
    os.utime(root / "a", ns=(1, 2))
    snapshot = take(repository, root)
    shutil.rmtree(root / "a")
    complete(restore(repository, snapshot, root / "a" / "b"))
    assert (root / "a" / "b" / "file").read_bytes() == b"content"
    assert os.listdir(root / "a") == ["b"]
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o711
    assert (root / "a").stat().st_mtime_ns == 2


@pytest.mark.parametrize("overwrite", [None, ALWAYS])
def test_large_and_sparse_files(
    repository: Repository, root: Path, tmp_path: Path, overwrite: Overwrite | None
) -> None:
    """Large files are restored, holes as holes, also over files of the same size with another end."""
    content = os.urandom(3_000_001)
    write(root / "large", content)
    with open(root / "sparse", "wb") as file:
        file.seek(50 << 30)
        file.write(b"in the middle")
        file.truncate(100 << 30)
    os.utime(root / "sparse", ns=(7, 7))
    write(root / "ends in a hole", b"x")
    os.truncate(root / "ends in a hole", 1_000_000)
    snapshot = take(repository, root)
    out = tmp_path / "out" / "root"
    if overwrite:
        write(out / "ends in a hole", b"x" + bytes(500_000) + b"y" * 499_999)
        write(out / "large", content[:-1] + bytes([content[-1] ^ 1]))
        write(out / "sparse", b"")
        os.truncate(out / "sparse", 100 << 30)
    complete(restore(repository, snapshot, root, tmp_path / "out", overwrite))
    assert (out / "large").read_bytes() == content
    restored = (out / "ends in a hole").read_bytes()
    assert (restored[:1], restored.count(0)) == (b"x", 999_999)
    st = (out / "sparse").stat()
    assert (st.st_size, st.st_mtime_ns) == (100 << 30, 7)
    assert trees.allocated_bytes(out / "sparse") <= 64 << 10
    with open(out / "sparse", "rb") as file:
        file.seek(50 << 30)
        assert file.read(13) == b"in the middle"


def test_small_holes_inside_a_block_stay_holes(tmp_path: Path, root: Path) -> None:
    """A page of data every 64 KiB does not become a file full of zeros."""
    with Repository.create(tmp_path / "big blocks", block_size=1 << 20) as repository:
        with open(root / "file", "wb") as file:
            for place in range(64):
                file.seek(place * 65536)
                file.write(b"page" * 1024)
        snapshot = take(repository, root)
        complete(restore(repository, snapshot, root, tmp_path / "out"))
    restored = tmp_path / "out" / "root" / "file"
    assert restored.read_bytes() == (root / "file").read_bytes()
    assert trees.allocated_bytes(restored) <= trees.allocated_bytes(root / "file") + 65536


def test_deeper_than_a_path_can_name(repository: Repository, root: Path, tmp_path: Path) -> None:
    """A tree of eleven hundred components, far beyond PATH_MAX, is restored."""
    trees.make_deep(root, depth=1100)
    snapshot = take(repository, root)
    complete(restore(repository, snapshot, root, tmp_path / "out"))
    # Compared by name and content on the way down: a manifest would need paths that no call takes.
    fd = os.open(tmp_path / "out" / "root", os.O_RDONLY)
    for _ in range(1100):
        (name,) = os.listdir(fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    assert os.listdir(fd) == ["the end"]
    os.close(fd)
    for top in (root, tmp_path / "out"):
        # pytest's own removal recurses.
        subprocess.run(["rm", "-rf", top], check=True, timeout=60)


# Conflicts and modes


def test_conflicts_are_all_listed_and_nothing_changes(
    repository: Repository, root: Path, tmp_path: Path
) -> None:
    """Existing files, the same ones too, stop a restore before anything is changed; merging directories is no conflict."""
    for name in ("a", "same", "dir/b", "dir/c", "new"):
        write(root / name, b"snapshot")
    snapshot = take(repository, root)
    out = tmp_path / "out" / "root"
    write(out / "a", b"mine")
    write(out / "same", b"snapshot")
    write(out / "dir" / "b" / "a directory", b"mine")
    write(out / "dir" / "other", b"mine")
    before = trees.manifest(out)
    with pytest.raises(DestinationExists) as caught:
        restore(repository, snapshot, root, tmp_path / "out")
    assert set(caught.value.conflicts) == {os.fsencode(out / name) for name in ("a", "same", "dir/b")}
    assert caught.value.exit_code == 6
    assert trees.manifest(out) == before
    plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(tmp_path / "out"), check=False)
    assert set(plan.conflicts) == set(caught.value.conflicts)


def test_a_directory_that_cannot_be_opened_keeps_its_error(
    repository: Repository, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that cannot open a directory below the top raises that error, and closes each descriptor once."""
    write(root / "dir" / "closed" / "file", b"snapshot")
    snapshot = take(repository, root)
    (tmp_path / "out" / "root" / "dir" / "closed").mkdir(parents=True)
    real = planning.open_directory

    def refuse(folder: int, name: bytes) -> int:
        if name == b"closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(folder, name)

    monkeypatch.setattr(planning, "open_directory", refuse)
    with pytest.raises(PermissionError):
        plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(tmp_path / "out"))


@pytest.mark.parametrize(
    ("mode", "older", "same_time", "newer"),
    [
        (Overwrite.ALWAYS, b"snap", b"snap", b"snap"),
        (Overwrite.IF_CHANGED, b"snap", b"snap", b"snap"),
        (Overwrite.IF_NEWER, b"snap", b"mine", b"mine"),
        (Overwrite.NEVER, b"mine", b"mine", b"mine"),
    ],
)
def test_each_overwrite_mode(
    repository: Repository, root: Path, mode: Overwrite, older: bytes, same_time: bytes, newer: bytes
) -> None:
    """Each mode replaces older, equally old and newer files of the same size as documented."""
    for name in ("older", "same", "newer", "missing"):
        write(root / name, b"snap")
        os.utime(root / name, ns=(1000, 1000))
    snapshot = take(repository, root)
    for name, time_ns in (("older", 1), ("same", 1000), ("newer", 2000)):
        write(root / name, b"mine")
        os.utime(root / name, ns=(time_ns, time_ns))
    (root / "missing").unlink()
    complete(restore(repository, snapshot, root, overwrite=mode))
    found = {name: (root / name).read_bytes() for name in ("older", "same", "newer", "missing")}
    assert found == {"older": older, "same": same_time, "newer": newer, "missing": b"snap"}


def test_equal_files_are_not_written_again(repository: Repository, root: Path) -> None:
    """A file with equal content keeps its inode, and its mode is corrected."""
    write(root / "same", b"x" * 10_000)
    write(root / "large", os.urandom(2_000_000))
    write(root / "mode", b"y")
    snapshot = take(repository, root)
    before = {path.name: path.stat().st_ino for path in root.iterdir()}
    os.chmod(root / "mode", 0o777)
    items: list[RestoreItem] = []
    plan = plan_restore(repository, snapshot, [os.fsencode(root)], overwrite=ALWAYS)
    result = execute(plan, report=items.append)
    assert (result.restored, result.skipped) == (0, 3)
    assert {path.name: path.stat().st_ino for path in root.iterdir()} == before
    assert stat.S_IMODE((root / "mode").stat().st_mode) == 0o644
    assert {os.path.basename(item.path): item.action for item in items} == {
        b"same": "skipped",
        b"large": "skipped",
        b"mode": "attributes",
    }


def test_directory_and_file_change_places(repository: Repository, root: Path) -> None:
    """An entry of another type is replaced, with its content, in an overwrite mode."""
    write(root / "file", b"a file")
    write(root / "dir" / "below", b"below")
    snapshot = take(repository, root)
    wanted = trees.manifest(root)
    (root / "file").unlink()
    write(root / "file" / "in" / "the way", b"")
    shutil.rmtree(root / "dir")
    (root / "dir").symlink_to("/")
    complete(restore(repository, snapshot, root, overwrite=ALWAYS))
    trees.assert_same(wanted, trees.manifest(root))


# Delete


def test_delete_removes_only_below_path(repository: Repository, root: Path, tmp_path: Path) -> None:
    """--delete removes what the snapshot lacks below PATH, except excluded paths and the state directory."""
    write(root / "in" / "kept", b"")
    snapshot = take(repository, root)
    for name in ("in/extra/deep/file", "in/cache/excluded", "in/mixed/cache/x", "in/mixed/gone", "outside"):
        write(root / name, b"")
    (root / "in" / ".ciuic-state").mkdir()

    def keep(path: bytes, is_dir: bool) -> bool:
        return path.endswith(b"/cache") and is_dir

    result = complete(restore(repository, snapshot, root / "in", overwrite=ALWAYS, delete=True, keep=keep))
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
    assert left == ["in/cache/excluded", "in/kept", "in/mixed/cache/x", "outside"]
    assert (root / "in" / ".ciuic-state").is_dir()
    # Of a directory that stays, what went from it is named.
    assert result.removed == [os.fsencode(root / "in" / name) for name in ("extra", "mixed/gone")]


def test_delete_never_removes_the_repository(root: Path) -> None:
    """A repository inside the restored directory survives --delete."""
    write(root / "file", b"x")
    (root / "store").mkdir()
    with Repository.create(root / "store" / "repository") as repository:
        snapshot = take(repository, root, excludes=("store",))
        write(root / "extra", b"x")
        complete(restore(repository, snapshot, root, overwrite=ALWAYS, delete=True))
        assert not (root / "extra").exists()
        assert repository.snapshots.load(snapshot.id) == snapshot


def test_delete_removes_nothing_in_a_damaged_directory(repository: Repository, root: Path) -> None:
    """--delete removes nothing where a directory of the snapshot cannot be read."""
    write(root / "dir" / "file", b"x")
    write(root / "ok", b"x")
    snapshot = take(repository, root)
    broken = repository.trees.entry(snapshot.roots[0].entry.content, b"dir")
    assert broken is not None
    snapshot = recommit(repository, snapshot, {b"dir": msgspec.structs.replace(broken, content=b"\1" * 16)})
    write(root / "dir" / "extra", b"x")
    (root / "ok").unlink()
    with Repository.open(repository.path) as opened:
        result = restore(opened, snapshot, root, overwrite=ALWAYS, delete=True)
    assert (root / "dir" / "extra").exists()
    assert (root / "dir" / "file").exists()
    assert (root / "ok").read_bytes() == b"x"
    (failure,) = result.failed
    assert failure.path == os.fsencode(root / "dir")
    assert failure.damaged


# Links


def test_planted_links_redirect_nothing(repository: Repository, root: Path, tmp_path: Path) -> None:
    """A symbolic link in the destination is replaced where it must be, never followed."""
    write(root / "dir" / "sub" / "file", b"restored")
    write(root / "plain", b"restored")
    snapshot = take(repository, root)
    victim = tmp_path / "victim"
    write(victim / "file", b"precious")
    write(victim / "sub" / "file", b"precious")
    before = trees.manifest(victim)
    shutil.rmtree(root / "dir")
    (root / "dir").symlink_to(victim)
    (root / "plain").unlink()
    (root / "plain").symlink_to(victim / "file")
    with pytest.raises(CiuicError, match="something else now"):
        restore(repository, snapshot, root / "dir" / "sub", overwrite=ALWAYS, delete=True)
    complete(restore(repository, snapshot, root, overwrite=ALWAYS, delete=True))
    assert (root / "dir" / "sub" / "file").read_bytes() == b"restored"
    assert not (root / "dir").is_symlink()
    assert not (root / "plain").is_symlink()
    assert trees.manifest(victim) == before


def test_hard_links_outside_the_path_are_not_touched(repository: Repository, root: Path) -> None:
    """A failed restore of one name of a hard-linked file leaves its other names unchanged."""
    write(root / "a" / "name", b"good")
    (root / "b").mkdir()
    os.link(root / "a" / "name", root / "b" / "name")
    snapshot = take(repository, root)
    (root / "a" / "name").write_bytes(b"bad!")
    complete(restore(repository, snapshot, root / "a", overwrite=ALWAYS))
    assert (root / "a" / "name").read_bytes() == b"good"
    assert (root / "b" / "name").read_bytes() == b"bad!"


def test_links_are_made_again(repository: Repository, root: Path, tmp_path: Path) -> None:
    """Names that shared an inode share one again, and others do not, nor those of another root."""
    write(root / "a", b"shared")
    os.link(root / "a", root / "b")
    os.link(root / "a", root / "c")
    write(root / "alone", b"alone")
    snapshot = take(repository, root)
    for name in ("b", "alone"):
        (root / name).unlink()
    write(root / "b", b"shared")
    os.link(root / "c", root / "alone")
    complete(restore(repository, snapshot, root, overwrite=ALWAYS))
    inodes = {path.name: path.stat().st_ino for path in root.iterdir()}
    assert inodes["a"] == inodes["b"] == inodes["c"] != inodes["alone"]
    assert (root / "alone").read_bytes() == b"alone"
    # The same numbers in a root of another file system.
    (record,) = snapshot.roots
    roots = [msgspec.structs.replace(record, path=os.fsencode(tmp_path / name)) for name in ("one", "other")]
    with repository.writer() as writer:
        id_ = repository.snapshots.new_id()
        both = writer.commit(SnapshotDraft(id=id_, time_ns=1, host="here", roots=tuple(roots)))
    complete(execute(plan_restore(repository, both, [root.path for root in roots])))
    assert (tmp_path / "one/a").samefile(tmp_path / "one/b")
    assert not (tmp_path / "one/a").samefile(tmp_path / "other/a")


def test_a_file_that_appears_meanwhile_is_not_replaced(
    repository: Repository, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that appears under a name that was free stays, and the restore is not complete."""
    write(root / "file", b"stored")
    snapshot = take(repository, root)
    (root / "file").unlink()
    place = NonDirectory.place

    def overtaken(file: NonDirectory, source: int, temporary: bytes) -> None:
        write(root / "file", b"newcomer")
        place(file, source, temporary)

    monkeypatch.setattr(NonDirectory, "place", overtaken)
    assert not restore(repository, snapshot, root, overwrite=ALWAYS).complete
    assert (root / "file").read_bytes() == b"newcomer"


# Failures


def test_damage_costs_only_the_file_it_is_in(repository: Repository, root: Path) -> None:
    """A file that cannot be restored is named and unchanged, the others are restored, and the code is 8."""
    for name in ("bad", "good"):
        write(root / name, os.urandom(9000))
    good = (root / "good").read_bytes()
    snapshot = take(repository, root)
    damage(repository, snapshot, b"bad")
    write(root / "bad", b"still mine")
    (root / "good").unlink()
    result = restore(repository, snapshot, root, overwrite=ALWAYS)
    assert (root / "good").read_bytes() == good
    assert (root / "bad").read_bytes() == b"still mine"
    assert [(failure.path, failure.damaged) for failure in result.failed] == [
        (os.fsencode(root / "bad"), True)
    ]
    error = result.error()
    assert isinstance(error, Partial)
    assert str(root / "bad") in error.message
    assert [path for path in leftovers(root) if path.name != ".ciuic-restore"] == []


def test_interrupted_restore_cleans_up_and_can_be_completed(
    repository: Repository, root: Path, tmp_path: Path
) -> None:
    """^C leaves no temporary file, and the same command without --overwrite completes the restore."""
    for number in range(40):
        write(root / f"file {number}", os.urandom(5000))
    write(root / "large", os.urandom(4_000_000))
    wanted = trees.manifest(root)
    snapshot = take(repository, root)
    plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(tmp_path / "out"))

    def interrupt(state: RestoreProgress) -> None:
        if state.files_done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(plan, progress=interrupt)
    out = tmp_path / "out" / "root"
    assert [path.name for path in leftovers(out)] == [".ciuic-restore"]
    assert not (out / "large").exists() or (out / "large").stat().st_size == 4_000_000
    result = complete(restore(repository, snapshot, root, tmp_path / "out"))
    assert result.skipped >= 10
    trees.assert_same(wanted, trees.manifest(out))
    assert not leftovers(out)


@pytest.fixture
def small_disk(short_tmp: Path) -> Iterator[Path]:
    place = short_tmp / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True, timeout=30)
    yield place
    subprocess.run(["umount", "-l", place], check=True, timeout=30)


@pytest.mark.mount
def test_a_full_disk_ends_it_cleanly_and_it_can_be_resumed(
    repository: Repository, root: Path, small_disk: Path
) -> None:
    """A full disk ends a restore with whole files only, and with more room it can be completed."""
    for number in range(30):
        write(root / f"file {number:02d}", os.urandom(60_000))
    wanted = trees.manifest(root)
    snapshot = take(repository, root)
    write(small_disk / "earlier", b"mine")
    result = restore(repository, snapshot, root, small_disk)
    assert "full" in result.stopped
    assert isinstance(result.error(), Partial)
    assert (small_disk / "earlier").read_bytes() == b"mine"
    there = [path for path in (small_disk / "root").iterdir() if path.name.startswith("file")]
    assert there
    assert all(path.read_bytes() == (root / path.name).read_bytes() for path in there)
    assert len(leftovers(small_disk)) <= 1
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True, timeout=30)
    complete(restore(repository, snapshot, root, small_disk))
    trees.assert_same(wanted, trees.manifest(small_disk / "root"))


@pytest.mark.mount
def test_a_read_only_destination_is_refused_at_once(
    repository: Repository, root: Path, small_disk: Path
) -> None:
    """A read-only destination gives NotPermitted with the reason before anything is tried."""
    write(root / "file", b"x")
    snapshot = take(repository, root)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=30)
    with pytest.raises(NotPermitted, match="read-only"):
        restore(repository, snapshot, root, small_disk / "deeper")


@pytest.mark.mount
def test_delete_stops_at_another_file_system(repository: Repository, root: Path, short_tmp: Path) -> None:
    """--delete removes nothing on a file system mounted below PATH, and reports that."""
    write(root / "file", b"x")
    snapshot = take(repository, root)
    mounted = short_tmp / "root" / "extra" / "mounted"
    write(short_tmp / "root" / "file", b"x")
    mounted.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounted], check=True, timeout=30)
    try:
        write(mounted / "precious", b"x")
        result = restore(repository, snapshot, root, short_tmp, ALWAYS, delete=True)
        assert (mounted / "precious").exists()
        assert [failure.path for failure in result.failed] == [os.fsencode(mounted)]
    finally:
        subprocess.run(["umount", "-l", mounted], check=True, timeout=30)


def test_a_restore_without_root_restores_all_but_owners(root: Path) -> None:
    """Owners are one failure in all without root; content, modes and times are right, without setuid bits."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        os.chmod(place, 0o755)
        with Repository.create(place / "repository") as repository:
            write(root / "file", b"content")
            write(root / "setuid", b"#!")
            os.chmod(root / "setuid", 0o4755)
            os.utime(root / "file", ns=(5, 6))
            snapshot = take(repository, root)
        subprocess.run(["chown", "-R", "65534:65534", place], check=True, timeout=30)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                with Repository.open(place / "repository") as opened:
                    result = restore(opened, snapshot, root, place / "out")
                expected = (3, 1, 2, True)
                got = (result.owner_failures, len(result.failed), result.restored, result.failed[0].attribute)
                status = 0 if got == expected else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        out = place / "out" / "root"
        assert (out / "file").read_bytes() == b"content"
        assert (out / "file").stat().st_mtime_ns == 6
        assert stat.S_IMODE((out / "setuid").stat().st_mode) == 0o755
    finally:
        shutil.rmtree(place)


# Marks and errors


def test_marks_of_the_snapshot_are_heeded(repository: Repository, root: Path, tmp_path: Path) -> None:
    """Files open for writing are listed; a mount point is restored empty, and its current content stays."""
    write(root / "torn", b"half")
    (root / "mounted").mkdir()
    snapshot = take(repository, root)
    tree = snapshot.roots[0].entry.content
    changed = {}
    for name, flag in ((b"torn", FLAG_OPEN_FOR_WRITING), (b"mounted", FLAG_MOUNTPOINT)):
        entry = repository.trees.entry(tree, name)
        assert entry is not None
        changed[name] = msgspec.structs.replace(entry, flags=flag)
    marked = recommit(repository, snapshot, changed)
    write(root / "mounted" / "inside", b"x")
    with Repository.open(repository.path) as opened:
        result = complete(restore(opened, marked, root, overwrite=ALWAYS, delete=True))
        assert result.open_for_writing == [os.fsencode(root / "torn")]
        assert result.not_held == []
        assert (root / "mounted" / "inside").exists()
        complete(restore(opened, marked, root, tmp_path / "out"))
        assert os.listdir(tmp_path / "out" / "root" / "mounted") == []


def test_a_dry_run_changes_nothing(repository: Repository, root: Path, tmp_path: Path) -> None:
    """A dry run makes not even the destination directory, and reports what would be done."""
    write(root / "dir" / "file", b"x")
    snapshot = take(repository, root)
    items: list[RestoreItem] = []
    plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(tmp_path / "out"))
    result = execute(plan, dry_run=True, report=items.append)
    assert (result.restored, result.restored_bytes, result.dry_run) == (1, 1, True)
    assert [item.action for item in items] == ["restored"]
    assert not (tmp_path / "out").exists()


def test_paths_that_cannot_be_meant(repository: Repository, root: Path, tmp_path: Path) -> None:
    """Unknown, relative and colliding paths, and a destination in the repository, are refused."""
    write(root / "a" / "same", b"1")
    write(root / "b" / "same", b"2")
    snapshot = take(repository, root)
    with pytest.raises(NotFound):
        restore(repository, snapshot, root / "nothing")
    with pytest.raises(UsageError):
        plan_restore(repository, snapshot, [b"relative"])
    both = [os.fsencode(root / "a" / "same"), os.fsencode(root / "b" / "same")]
    with pytest.raises(UsageError, match="both become"):
        plan_restore(repository, snapshot, both, os.fsencode(tmp_path / "out"))
    with pytest.raises(UsageError, match="repository"):
        restore(repository, snapshot, root, repository.path / "packs")
    nested = [os.fsencode(root / "a" / "same"), os.fsencode(root / "a")]
    plan = plan_restore(repository, snapshot, nested, overwrite=ALWAYS)
    assert [target.path for target in plan.targets] == [os.fsencode(root / "a")]


# Times


@pytest.mark.mount
def test_times_that_the_destination_does_not_hold_are_reported_once(
    repository: Repository, root: Path, tmp_path: Path
) -> None:
    """On 128-byte inodes, which hold seconds up to 2038, one failure names a file and counts the others."""
    needs(small_disks.missing("ext4"))
    for name, year_2106_ns in (("a", 4_300_000_000 * 10**9), ("b", 1), ("c", 10**9)):
        (root / name).write_text("x")
        os.utime(root / name, ns=(0, year_2106_ns))
    os.utime(root, ns=(0, 0))
    snapshot = take(repository, root)
    with small_disks.small_disk(tmp_path, "ext4", 16 << 20, "-I", "128") as disk:
        result = restore(repository, snapshot, root, disk / "out")
        assert (disk / "out" / "root" / "c").stat().st_mtime_ns == 10**9
    assert result.time_failures == 2
    assert not result.complete
    (failure,) = result.failed
    assert failure.attribute
    assert "nor that of 1 other" in failure.reason


def test_a_time_that_a_snapshot_does_not_hold_is_named_and_compares_as_equal(
    repository: Repository, root: Path
) -> None:
    """A file of the year 2300 is restored with the last time of 2262, named, and not written again as it stands."""
    (root / "late").write_text("x")
    os.utime(root / "late", ns=(0, 10_413_792_000 * 10**9))
    snapshot = take(repository, root)
    assert complete(restore(repository, snapshot, root, overwrite=Overwrite.IF_CHANGED)).restored == 0
    assert (root / "late").stat().st_mtime_ns == 10_413_792_000 * 10**9
    (root / "late").unlink()
    result = complete(restore(repository, snapshot, root, overwrite=ALWAYS))
    assert result.far_times == [os.fsencode(root / "late")]
    assert (root / "late").stat().st_mtime_ns == MAX_TIME_NS


# ACLs


@pytest.mark.mount
def test_an_acl_that_was_removed_elsewhere_does_not_come_back_on_xfs(
    repository: Repository, root: Path, tmp_path: Path
) -> None:
    """XFS shows an ACL a second time as trusted.SGI_ACL_FILE, which is neither captured nor restored."""
    needs(small_disks.missing("xfs"))
    acl = b"\2\0\0\0" + b"".join(
        struct.pack("<HHI", *entry)
        for entry in ((1, 6, NO_ID), (2, 6, 5), (4, 0, NO_ID), (16, 6, NO_ID), (32, 0, NO_ID))
    )
    with small_disks.small_disk(tmp_path, "xfs") as disk:
        (disk / "f").write_text("secret")
        os.setxattr(disk / "f", "system.posix_acl_access", acl)
        duplicate = os.getxattr(disk / "f", "trusted.SGI_ACL_FILE")
        recorded = [entry.xattrs for entry in entries_of(repository, take(repository, disk))]
        assert recorded == [((b"system.posix_acl_access", acl),)]
        # A snapshot of an older version, of a file whose ACL was removed on another file system.
        (root / "f").write_text("secret")
        older = take(repository, root)
        (plain,) = entries_of(repository, older)
        pairs = ((b"trusted.SGI_ACL_FILE", duplicate), (b"user.kept", b"1"))
        older = recommit(repository, older, {b"f": msgspec.structs.replace(plain, xattrs=pairs)})
        complete(restore(repository, older, root / "f", disk / "new"))
        assert "system.posix_acl_access" not in os.listxattr(disk / "new" / "f")
        assert os.getxattr(disk / "new" / "f", "user.kept") == b"1"


def entries_of(repository: Repository, snapshot: Snapshot) -> list[Entry]:
    return list(repository.trees.entries(snapshot.roots[0].entry.content))


# Immutable and append-only files (chattr)


@pytest.mark.mount
def test_immutable_and_append_only_files_are_named_and_the_rest_is_restored(
    repository: Repository, tmp_path: Path
) -> None:
    """What may not be replaced or removed fails alone, with the flag as the reason, and leaves no temporary names."""
    needs(small_disks.missing("ext4"))
    with small_disks.small_disk(tmp_path, "ext4", 16 << 20) as disk:
        top = disk / "root"
        for name in ("fixed", "log", "free", "fixed-directory/x", "log-directory/y"):
            write(top / name, b"1")
        snapshot = take(repository, top)
        for name in ("fixed", "log", "free", "log-directory/y", "extra", "log-directory/extra"):
            write(top / name, b"22")
        (top / "fixed-directory" / "x").unlink()
        flagged = {"+i": ("fixed", "extra", "fixed-directory"), "+a": ("log", "log-directory")}
        for flag, names in flagged.items():
            subprocess.run(["chattr", flag, *names], cwd=top, check=True, timeout=30)
        try:
            result = restore(repository, snapshot, top, overwrite=ALWAYS, delete=True)
        finally:
            subprocess.run(["chattr", "-R", "-ia", top], check=True, timeout=30)
        assert (top / "free").read_bytes() == b"1"
        reasons = {
            os.path.relpath(os.fsdecode(failure.path), top): failure.reason for failure in result.failed
        }
        for name in ("fixed", "log", "fixed-directory/x", "log-directory/y", "extra", "log-directory/extra"):
            assert "append-only" in reasons[name], name
            assert (top / name).exists() is (name != "fixed-directory/x")
        # The mark of an unfinished restore alone.
        assert leftovers(top) == [top / ".ciuic-restore"]


def test_a_believed_file_of_another_owner_is_replaced(tmp_path: Path) -> None:
    """Whoever gives a file of their own the size and time of a lost one does not have it given to that one's owner."""
    root, out = tmp_path / "root", tmp_path / "out"
    root.mkdir()
    (root / "file").write_bytes(b"right")
    with Repository.create(tmp_path / "repository") as repository:
        snapshot = take(repository, root)
        for _ in range(2):
            plan = plan_restore(
                repository, snapshot, [os.fsencode(root)], os.fsencode(out), overwrite=Overwrite.IF_CHANGED
            )
            assert execute(plan).complete
            restored = out / "root/file"
            assert (restored.read_bytes(), restored.stat().st_uid) == (b"right", os.geteuid())
            time_ns = restored.stat().st_mtime_ns
            restored.write_bytes(b"wrong")
            os.utime(restored, ns=(time_ns, time_ns))
            os.chown(restored, 4321, -1)
