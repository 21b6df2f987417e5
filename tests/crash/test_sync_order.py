"""Sync order: nothing is acknowledged, named or relied on before it is synced.

One test for each promise of durability.md.

The process's own system calls are watched for contents and names that were never synced. That complements power_disk.py, which shows what a missing sync costs: some are only needed together with a second
failure, or prevent a loss that would show after years. Here the order itself is checked. Only changes through
``os`` or ``Path`` are seen, which is how everything durable is written; contents are compared by size, so
that a write through a file object counts too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.restoring import take, write
from support.small_repository import BLOCK, content, make_snapshot, read_files

from ciuic.artefacts.folder import ExportFolder
from ciuic.compare.restore_records import record_restore
from ciuic.config import add_roots
from ciuic.config.model import RootConfig
from ciuic.config.repository_mark import mark_of, write_mark
from ciuic.fuse_layer.core.overlay_core import read_saved
from ciuic.integrations.checkpoint_pointer import Pointer, write_pointer
from ciuic.protocol.state_directory import open_state
from ciuic.protocol.stored_remotely import StoredRecord, write_record
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.repository import Repository
from ciuic.repository import pack_format as pf
from ciuic.repository.index_database import INDEX_NAME
from ciuic.repository.promised import Promise, record_loss
from ciuic.repository.writer_index import WriterIndex
from ciuic.restore import Overwrite, execute, plan_restore
from ciuic.restore.journal import JOURNAL_NAME
from ciuic.system.disk import Disk
from ciuic.training.convert.destination import new_directory, new_file
from ciuic.training.dcp.metadata import CheckpointPointer, pointer_path, write_checkpoint_pointer
from ciuic.types import SnapshotId

_NAMING = ("mkdir", "unlink", "rmdir", "symlink", "mknod", "mkfifo")
_MOVING = ("rename", "replace", "link")
_CHANGING = ("chmod", "chown", "utime", "setxattr")
_WRITING = ("write", "pwrite", "pwritev", "ftruncate")


class SyncWatch:
    """Watch that works from its creation to the end of the test."""

    def __init__(self, patch: pytest.MonkeyPatch, top: Path) -> None:
        self._top = str(top)
        self._synced: dict[int, int] = {}
        """Inode → its size when it was synced, and nothing written since."""
        self._names: set[str] = set()
        """Directories with a name that is not durable."""
        self.renamed_unsynced: list[str] = []
        """Final names that were given to unsynced content, or to a directory with names that are not durable."""
        self._real = {
            name: getattr(os, name)
            for name in (*_NAMING, *_MOVING, *_CHANGING, *_WRITING, "open", "fsync", "fdatasync")
        }
        for name in _NAMING:
            patch.setattr(os, name, self._naming(name))
        for name in _MOVING:
            patch.setattr(os, name, self._moving(name))
        for name in _CHANGING:
            patch.setattr(os, name, self._changing(name))
        for name in _WRITING:
            patch.setattr(os, name, self._writing(name))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._syncing(name))
        patch.setattr(os, "open", self._open)

    # -- queries

    def is_synced(self, path: str | Path) -> bool:
        """Return whether the file's present content was synced."""
        facts = os.lstat(path)
        return self._synced.get(facts.st_ino) == facts.st_size

    def unsynced(self, *spared: str) -> list[str]:
        """Return unsynced directories and files below ``top``; ``spared`` are path suffixes."""
        found = sorted(self._names)
        for directory, _, files in os.walk(self._top):
            paths = (f"{directory}/{name}" for name in files)
            found += [path for path in paths if not os.path.islink(path) and not self.is_synced(path)]
        found = [path for path in found if path.startswith(self._top) and os.path.exists(path)]
        return [
            os.path.relpath(path, self._top) for path in found if not path.endswith(tuple(spared) or ("\0",))
        ]

    def trust_all(self) -> None:
        """Count everything there as durable."""
        self._names.clear()
        for directory, _, files in os.walk(self._top):
            for name in files:
                facts = os.lstat(f"{directory}/{name}")
                self._synced[facts.st_ino] = facts.st_size

    def trust_nothing(self) -> None:
        """Count everything there as unsynced, as if another program had written it."""
        self._synced.clear()

    # -- replacements in os

    def _naming(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            result = self._real[name](path, *args, **options)
            self._named(path, options.get("dir_fd"))
            return result

        return call

    def _moving(self, name: str) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            kept = _path(source, options.get("src_dir_fd"))
            if name != "link" and (
                kept in self._names
                or (os.path.isfile(kept) and not os.path.islink(kept) and not self.is_synced(kept))
            ):
                self.renamed_unsynced.append(_path(target, options.get("dst_dir_fd")))
            result = self._real[name](source, target, **options)
            self._named(target, options.get("dst_dir_fd"))
            if name != "link":
                self._named(source, options.get("src_dir_fd"))
            return result

        return call

    def _changing(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            result = self._real[name](path, *args, **options)
            if options.get("follow_symlinks", True) and options.get("dir_fd") is None:
                self._synced.pop(os.stat(path).st_ino, None)
            return result

        return call

    def _writing(self, name: str) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            self._synced.pop(os.fstat(fd).st_ino, None)
            return self._real[name](fd, *args)

        return call

    def _syncing(self, name: str) -> Callable[..., Any]:
        def call(fd: int) -> None:
            self._real[name](fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.isdir(path):
                self._names.discard(path)
            else:
                facts = os.fstat(fd)
                self._synced[facts.st_ino] = facts.st_size

        return call

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        new = flags & os.O_CREAT and not os.path.lexists(_path(path, dir_fd))
        fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if new:
            self._named(path, dir_fd)
            self._synced.pop(os.fstat(fd).st_ino, None)
        return fd

    def _named(self, path: Any, dir_fd: int | None) -> None:
        self._names.add(os.path.realpath(os.path.dirname(_path(path, dir_fd))))


def _path(path: Any, dir_fd: int | None) -> str:
    text = os.fsdecode(path)
    if dir_fd is not None:
        text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
    return os.path.normpath(os.path.abspath(text))


CACHE = (INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm", f"{INDEX_NAME}-journal", "lock")
"""Files of the index; nothing durable depends on them."""
FILES = {b"a": content(2, 5), b"b": content(3, 4), b"c": content(4, 9)}


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SyncWatch:
    return SyncWatch(monkeypatch, tmp_path)


def _unsynced(watch: SyncWatch) -> list[str]:
    assert watch.renamed_unsynced == []
    # The entry of the directory itself: index and lock files come and go in it.
    return watch.unsynced(*CACHE, "repository")


def test_a_new_repository_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """A new repository's files, its folders and its own name are durable."""
    Repository.create(tmp_path / "repository", block_size=BLOCK).close()
    assert watch.renamed_unsynced == []
    assert watch.unsynced(*CACHE) == []


def test_results_are_durable_when_a_call_returns(
    watch: SyncWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content and names are synced when a commit, mark, removal, rewrite or drop of packs returns.

    A footer is written only after what it describes is synced, and the index lists only synced data in packs that are there.
    """
    vouched: list[bool] = []
    synced: list[bool] = []
    there: list[bool] = []
    encode, add, drop = pf.encode_footer, WriterIndex.add, WriterIndex.drop

    def encoding(end: int, records: Any) -> bytes:
        packs = sorted((tmp_path / "repository/packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        vouched.append(any(path.stat().st_size == end and watch.is_synced(path) for path in packs))
        return encode(end, records)

    def adding(index: WriterIndex, number: int, size_bytes: int, *args: Any) -> None:
        synced.append(watch.is_synced(tmp_path / f"repository/packs/{number:016x}.pack"))
        add(index, number, size_bytes, *args)

    def dropping(index: WriterIndex, number: int, *args: Any) -> None:
        there.append((tmp_path / f"repository/packs/{number:016x}.pack").exists())
        drop(index, number, *args)

    monkeypatch.setattr(WriterIndex, "drop", dropping)
    monkeypatch.setattr(pf, "encode_footer", encoding)
    monkeypatch.setattr(WriterIndex, "add", adding)
    with (
        Repository.create(tmp_path / "repository", block_size=BLOCK) as repository,
        repository.writer(pack_bytes=40_000) as writer,
    ):
        for number in range(3):
            make_snapshot(
                writer, f"cs-00000{number}", {b"x": content(2 * number, 5), **FILES}, time_ns=number + 1
            )
            assert _unsynced(watch) == []
        writer.set_marks(SnapshotId("cs-000001"), hold=True)
        assert _unsynced(watch) == []
        writer.remove_snapshots([SnapshotId("cs-000001"), SnapshotId("cs-000000")])
        assert _unsynced(watch) == []
        for pack in repository.packs():
            writer.rewrite_pack(pack.number, lambda _chunk: True)
            assert _unsynced(watch) == []
        writer.drop_pack(repository.packs()[0].number)
        assert _unsynced(watch) == []
    assert vouched
    assert all(vouched), "a footer was written behind what is not synced"
    assert synced
    assert all(synced), "the index was told of what is not synced"
    assert there
    assert all(there), "the index vouched for a pack that was gone"


def test_a_recovered_tail_is_synced_before_it_is_relied_on(
    watch: SyncWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tail recovered from a killed writer is synced before new snapshots refer to it.

    It may be in the page cache only: a second power cut would otherwise take data from the next snapshot.
    """
    path = tmp_path / "repository"
    with Repository.create(path, block_size=BLOCK) as repository, repository.writer() as writer:
        make_snapshot(writer, "cs-000001", FILES)
        writer.put_chunk(content(8, 1))
        monkeypatch.setattr(repository, "forget_pack", lambda _number: None)
        for appender in writer._store.appenders.values():
            # Written, neither synced nor in the index.
            appender.flush()
    watch.trust_nothing()
    add, synced = WriterIndex.add, []

    def adding(index: WriterIndex, number: int, size_bytes: int, *args: Any) -> None:
        synced.append(watch.is_synced(path / f"packs/{number:016x}.pack"))
        add(index, number, size_bytes, *args)

    monkeypatch.setattr(WriterIndex, "add", adding)
    for file in path.glob(INDEX_NAME + "*"):
        file.unlink()
    with Repository.open(path) as repository, repository.writer():
        pass
    assert synced
    assert all(synced)


@pytest.mark.parametrize("written", [False, True], ids=["buffered", "written"])
def test_a_pack_that_grows_is_rewritten_with_all_that_was_put_into_it(tmp_path: Path, written: bool) -> None:
    """Rewriting a pack that still grows also copies its unsynced and unwritten chunks.

    The index lists their new places.
    """
    with Repository.create(tmp_path / "repository", block_size=BLOCK) as repository:
        with repository.writer() as writer:
            make_snapshot(writer, "cs-000001", {b"a": content(2, 3)})
            writer.put_chunk(content(4, 1))
            if written:
                writer._store.appenders["data"].flush()
            for pack in repository.packs():
                writer.rewrite_pack(pack.number, lambda _chunk: True)
            make_snapshot(writer, "cs-000002", {b"a": content(4, 1)}, time_ns=2)
        assert repository.check_index() == []
        assert read_files(repository, "cs-000002") == {b"a": content(4, 1)}


def test_saved_tracking_is_used_once_across_a_power_cut(watch: SyncWatch, tmp_path: Path) -> None:
    """Saved tracking is whole before it has its name, and durably removed before it is used.

    Tracking that reappeared after a power cut would hide changes.
    """
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        Disk().replace_file(b"tracking", b"x" * 10_000, dir_fd=fd)
        assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])
        assert read_saved(fd, b"tracking") == b"x" * 10_000
        assert watch.unsynced() == []
    finally:
        os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_restored_files_are_durable(
    watch: SyncWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore syncs each file before naming it, and each directory after its last name.

    The note that a restore is under way is durable first. At the end nothing waits for a sync, even if only
    attributes changed.
    """
    root, out = tmp_path / "root", tmp_path / "out"
    for number in range(3):
        write(root / f"d/{number}", os.urandom(5000))
    write(root / "large", os.urandom(1_500_000))
    (root / "link").symlink_to("x")
    os.link(root / "large", root / "d/again")
    noted: list[bool] = []
    rename = os.rename

    def renaming(*args: Any, **options: Any) -> None:
        notes = [path for path in out.rglob(JOURNAL_NAME.decode()) if path.stat().st_size]
        noted.append(any(watch.is_synced(note) for note in notes))
        rename(*args, **options)

    with Repository.create(tmp_path / "repository", block_size=BLOCK) as repository:
        snapshot = take(repository, root)
        watch.trust_all()
        for overwrite in (None, Overwrite.IF_CHANGED):
            with monkeypatch.context() as patch:
                patch.setattr(os, "rename", renaming)
                plan = plan_restore(
                    repository, snapshot, [os.fsencode(root)], os.fsencode(out), overwrite=overwrite
                )
                assert execute(plan).complete
            assert watch.renamed_unsynced == []
            assert [path for path in watch.unsynced() if path.startswith("out")] == []
            (out / "root/d/1").chmod(0o600)
            (out / "root/d/2").write_bytes(b"other")
    assert noted
    assert all(noted)


def test_a_changed_configuration_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """A changed configuration is the old file or the new one, whole, under its name."""
    file = tmp_path / "ciuic.toml"
    file.write_text("")
    # The lock, which is empty, is made before.
    (tmp_path / ".ciuic.toml.lock").touch(0o600)
    watch.trust_all()
    add_roots(file, [RootConfig(tmp_path / "a")], repository_path=tmp_path / "r")
    assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_the_mark_of_a_seen_root_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """The mark that a root was seen is durable: without it an absent disk would pass for a new root."""
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_PATH)
    os.close(open_state(fd).fd)
    watch.trust_all()
    try:
        write_mark(fd, mark_of(tmp_path / "r", "f" * 32, []))
    finally:
        os.close(fd)
    assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_what_a_remote_has_stored_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """The record of what a remote has stored is durable, content and name: prune removes what it has."""
    (tmp_path / "nas").mkdir()
    watch.trust_all()
    write_record("nas", StoredRecord(repository="f" * 32, stored=frozenset({"cs-000001"})), tmp_path)
    assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_why_a_snapshot_was_lost_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """The reason why a snapshot was lost is durable, content and name, before it is reported."""
    repository = tmp_path / "repository"
    repository.mkdir()
    watch.trust_all()
    record_loss(repository, Promise(id="cs-000001", time_ns=1, reason="no space", lost_ns=2))
    assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_a_power_cut_leaves_a_whole_restore_note_or_none(watch: SyncWatch, tmp_path: Path) -> None:
    """A power cut leaves the note of a restore whole, or leaves none."""
    (tmp_path / "repository").mkdir()
    watch.trust_all()
    record_restore(tmp_path / "repository", "cs-000001", [b"/root/a"], ["cs-000001"])
    assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_a_checkpoint_file_of_lightning_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """A power cut after a checkpoint was saved leaves the whole file that names its snapshot."""
    watch.trust_all()
    write_pointer(tmp_path / "last.ckpt", Pointer("checkpoint-1", "/snapshots"))
    assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_an_export_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """Content and names of an exported file and folder are durable, new ones and those that replace others."""
    (tmp_path / "folder").mkdir()
    for overwrite in (False, True):
        watch.trust_all()
        with new_file(tmp_path / "state.pt", overwrite=overwrite) as file:
            file.write(b"state")
        with new_directory(tmp_path / "folder/dcp", overwrite=overwrite, names=["a"]) as made:
            fd = os.open(made / "a", os.O_CREAT | os.O_WRONLY)
            os.write(fd, b"part")
            os.close(fd)
        assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_an_artefact_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """Files of an artefact are synced before they have their names, and all names before the export ends."""
    with ExportFolder(tmp_path / "artefact") as folder:
        folder.begin()
        folder.write(b"below/deep/file", (b"content", bytes(4096)))
        folder.write(b"file", (b"content",))
        folder.link(b"link", b"file")
        folder.sync()
        temporary = "artefact/.ciuic-export.tmp"
        assert (watch.renamed_unsynced, watch.unsynced(temporary)) == ([], [])
        folder.remove(b"below/deep/file")
        folder.sync()
        assert watch.unsynced(temporary) == []


def test_a_new_directory_of_a_checkpoint_is_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """A power cut after a checkpoint was saved leaves its directory, and the whole file in it that names the snapshot."""
    watch.trust_all()
    (tmp_path / "step-1").mkdir()
    write_checkpoint_pointer(
        pointer_path(tmp_path / "step-1"), CheckpointPointer("ciuic", "dcp", "1", "/step-1")
    )
    assert (watch.renamed_unsynced, watch.unsynced()) == ([], [])


def test_objects_of_a_directory_are_durable(watch: SyncWatch, tmp_path: Path) -> None:
    """An object of a remote that is a directory is durable when a call returns, and so are its directories.

    That includes what another host made and may not have synced yet: a lost create is relied on.
    """
    incoming = ".incoming"
    objects = DirectoryObjects(f"{tmp_path}/above/remote", make=True)
    assert watch.unsynced() == []
    objects.put("packs/data/00/one", [b"content"])
    assert watch.unsynced(incoming) == []
    objects.put("packs/data/00/one", [b"other content"])
    assert watch.unsynced(incoming) == []
    assert objects.create("w/writer/0", b"entry")
    assert watch.unsynced(incoming) == []
    os.mkdir(f"{tmp_path}/above/remote/w/other")
    objects.put("w/other/0", [b"entry"])
    assert watch.unsynced(incoming) == []
    fd = os.open(f"{tmp_path}/above/remote/w/writer/1", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.fsync(fd)
    os.close(fd)
    assert not objects.create("w/writer/1", b"mine")
    assert watch.unsynced(incoming) == []
    objects.delete(["w/writer/1"])
    assert watch.unsynced(incoming) == []
    assert watch.renamed_unsynced == []
