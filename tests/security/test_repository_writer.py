"""Attacker: the writer of a repository from which root restores or which root reads."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest
from support.cli_repository import CliRepository

from ciuic.types import Entry

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="special files need root")
STRANGER = 47_614
CAPABILITY = b"\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
"""cap_net_raw=ep (VFS_CAP_REVISION_2)."""
_FILE = {"uid": 0, "gid": 0, "mtime_ns": 10**18}


def special_entries() -> dict[bytes, Entry]:
    """Return one entry of each kind of special file."""
    return {
        b"setuid": Entry(name=b"setuid", mode=stat.S_IFREG | 0o4755, **_FILE),
        b"setgid": Entry(name=b"setgid", mode=stat.S_IFREG | 0o2755, **_FILE),
        b"capable": Entry(
            name=b"capable",
            mode=stat.S_IFREG | 0o755,
            xattrs=((b"security.capability", CAPABILITY),),
            **_FILE,
        ),
        b"trusted": Entry(
            name=b"trusted", mode=stat.S_IFREG | 0o644, xattrs=((b"trusted.x", b"1"),), **_FILE
        ),
        b"null": Entry(name=b"null", mode=stat.S_IFCHR | 0o666, rdev=os.makedev(1, 3), **_FILE),
        b"disk": Entry(name=b"disk", mode=stat.S_IFBLK | 0o666, rdev=os.makedev(8, 0), **_FILE),
    }


LEFT_OUT = {
    "setuid": "setuid bit",
    "setgid": "setgid bit",
    "capable": "attribute security.capability",
    "trusted": "attribute trusted.x",
    "null": "character device 1:3",
    "disk": "block device 8:0",
}


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    """Provide a snapshot with a special file of each kind, and a pipe, a sticky directory and a file."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    sticky = Entry(name=b"sticky", mode=stat.S_IFDIR | 0o3777, **_FILE)
    pipe = Entry(name=b"pipe", mode=stat.S_IFIFO | 0o600, **_FILE)
    made.snapshot({**special_entries(), b"sticky": sticky, b"pipe": pipe, b"plain": b"content"})
    return made


def give_away(path: Path) -> None:
    """Give the repository to another user."""
    for folder, folders, files in os.walk(path):
        for name in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
            os.lchown(name, STRANGER, STRANGER)


def restored(
    repository: CliRepository, tmp_path: Path, *options: str, code: int
) -> tuple[Path, dict[str, str]]:
    """Return the restored root, and the left-out entries of the JSON document by name."""
    dest = tmp_path / "dest"
    words = ("restore", "-s", "latest", "-p", str(repository.root), "-d", str(dest), "--json", *options)
    result = repository.run(*words)
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert document["code"] == code
    assert bool(document["left_out_because"]) == (code == 8)
    return dest / repository.root.name, {
        os.path.basename(left["path"]): left["what"] for left in document["left_out"]
    }


def special_files(top: Path) -> set[str]:
    """Return the names below that carry privileges."""
    found = set()
    for path in top.iterdir():
        mode = path.lstat().st_mode
        lends = stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID)
        if lends or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or os.listxattr(path, follow_symlinks=False):
            found.add(path.name)
    return found


def test_from_a_repository_of_root_everything_comes_back(repository: CliRepository, tmp_path: Path) -> None:
    """A restore from root's own repository brings back special files, bits and attributes."""
    top, left_out = restored(repository, tmp_path, code=0)
    assert left_out == {}
    assert special_files(top) == set(LEFT_OUT)


def test_a_foreign_repository_restores_no_special_files_or_bits(
    repository: CliRepository, tmp_path: Path
) -> None:
    """A restore from another user's repository leaves out and names each special file, bit and attribute.

    The exit code is that of a partial restore; everything else is there.
    """
    give_away(repository.path)
    top, left_out = restored(repository, tmp_path, code=8)
    assert left_out == LEFT_OUT
    assert special_files(top) == set()
    assert {path.name for path in top.iterdir()} == {
        "setuid",
        "setgid",
        "capable",
        "trusted",
        "sticky",
        "pipe",
        "plain",
    }
    assert stat.S_IMODE((top / "sticky").stat().st_mode) == 0o3777
    assert stat.S_IMODE((top / "setuid").stat().st_mode) == 0o755


def test_an_explicit_word_decides(repository: CliRepository, tmp_path: Path) -> None:
    """The option --special restores a stranger's special files and --no-special leaves out root's own.

    Both end with 0.
    """
    top, left_out = restored(repository, tmp_path, "--no-special", code=0)
    assert left_out == LEFT_OUT
    assert special_files(top) == set()
    give_away(repository.path)
    top, left_out = restored(repository, tmp_path, "--special", "--overwrite", code=0)
    assert left_out == {}
    assert special_files(top) == set(LEFT_OUT)


def test_a_repository_that_is_trusted_is_restored_from_like_roots_own(
    repository: CliRepository, tmp_path: Path
) -> None:
    """The owner of a repository counts as root does with --trust-repository."""
    give_away(repository.path)
    dest = tmp_path / "dest"
    result = repository.run(
        "--trust-repository", "restore", "-s", "latest", "-p", str(repository.root), "-d", str(dest)
    )
    assert result.exit_code == 0, result.output
    assert special_files(dest / "root") == set(LEFT_OUT)


def test_existing_files_lose_special_bits_and_attributes(repository: CliRepository, tmp_path: Path) -> None:
    """A restore without special files clears bits and attributes of existing files and leaves devices."""
    restored(repository, tmp_path, code=0)
    top, _ = restored(repository, tmp_path, "--no-special", "--overwrite", "--delete", code=0)
    assert special_files(top) == {"null", "disk"}


def test_a_dry_run_lists_the_same_entries(repository: CliRepository, tmp_path: Path) -> None:
    """A dry run lists the same entries as the restore and makes nothing."""
    give_away(repository.path)
    top, left_out = restored(repository, tmp_path, "--dry-run", code=8)
    assert left_out == LEFT_OUT
    assert not top.exists()


def test_the_list_is_also_for_people(repository: CliRepository, tmp_path: Path) -> None:
    """The list on stderr names each path, the possible writer, and the option that restores the entries."""
    give_away(repository.path)
    result = repository.run(
        "restore", "-s", "latest", "-p", str(repository.root), "-d", str(tmp_path / "dest")
    )
    assert result.exit_code == 8
    for name, what in LEFT_OUT.items():
        assert f"{tmp_path}/dest/root/{name}: {what}" in result.stderr
    assert f"owner uid {STRANGER}" in result.stderr
    assert "--special" in result.stderr


@pytest.mark.parametrize("where", ["itself", "above", "its configuration", "open to all", "a link to it"])
def test_a_repository_is_roots_own_only_if_no_other_user_may_change_it(
    repository: CliRepository, tmp_path: Path, where: str
) -> None:
    """A repository is root's own only if no other user may change it or a directory above it."""
    if where == "itself":
        os.chown(repository.path, STRANGER, STRANGER)
    elif where == "above":
        os.chown(tmp_path, STRANGER, STRANGER)
    elif where == "its configuration":
        os.chown(repository.path / "config.copy", STRANGER, STRANGER)
    elif where == "open to all":
        repository.path.chmod(0o777)
    else:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", STRANGER, STRANGER)
        (tmp_path / "theirs/link").symlink_to(repository.path)
        repository.path = tmp_path / "theirs/link"
    _, left_out = restored(repository, tmp_path, code=8)
    assert left_out == LEFT_OUT


def test_the_names_of_ciuics_own_state_are_not_restored(tmp_path: Path) -> None:
    """A state directory at the top of a root in a snapshot is never restored as the daemon's own.

    Below the top, and for marks of restores, this holds for another user's repository.
    """
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    state = {b"undo": {b"log": b"planted"}}
    made.snapshot(
        {b".ciuic-state": state, b"below": {b".ciuic-state": state, b".ciuic-restore": b"{}"}, b"plain": b""}
    )
    top, left_out = restored(made, tmp_path, "--special", code=0)
    assert left_out == {".ciuic-state": "name reserved for ciuic"}
    assert sorted(os.listdir(top)) == ["below", "plain"]
    give_away(made.path)
    top, _ = restored(made, tmp_path / "again", code=8)
    assert os.listdir(top / "below") == []


def test_a_special_file_named_with_p_is_not_exempt(repository: CliRepository, tmp_path: Path) -> None:
    """Naming a device or a setuid file with -p does not exempt it from the rule."""
    give_away(repository.path)
    for name, made in (("null", False), ("setuid", True)):
        dest = tmp_path / name
        result = repository.run(
            "restore", "-s", "latest", "-p", str(repository.root / name), "-d", str(dest), "--json"
        )
        assert result.exit_code == 8
        assert [left["what"] for left in json.loads(result.stdout)["left_out"]] == [LEFT_OUT[name]]
        assert (dest / name).exists() == made
        assert not made or special_files(dest) == set()


def test_names_of_one_special_inode_are_all_left_out(tmp_path: Path) -> None:
    """Hard links to a device make no device, and those to a setuid file share a file without the bit."""
    from support.restoring import take

    from ciuic.repository import Repository
    from ciuic.restore import execute, plan_restore

    root = tmp_path / "root"
    root.mkdir()
    os.mknod(root / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (root / "tool").write_bytes(b"content")
    (root / "tool").chmod(0o4755)
    for name in ("device", "tool"):
        os.link(root / name, root / f"{name} too")
    with Repository.create(tmp_path / "repository", block_size=4096) as repository:
        snapshot = take(repository, root)
        result = execute(
            plan_restore(
                repository, snapshot, [os.fsencode(root)], os.fsencode(tmp_path / "dest"), special=False
            )
        )
    assert len(result.left_out) == 4
    assert result.complete
    top = tmp_path / "dest/root"
    assert sorted(os.listdir(top)) == ["tool", "tool too"]
    assert special_files(top) == set()
    assert (top / "tool").stat().st_nlink == 2


def test_missing_directories_on_the_way_are_held_to_the_same_rule(tmp_path: Path) -> None:
    """Parents restored on the way get no special attributes from another user's snapshot."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    made.snapshot({b"above": {b"file": b"content"}})
    from ciuic.repository import Repository
    from ciuic.types import SnapshotDraft

    with Repository.open(made.path) as repository, repository.writer() as writer:
        old = repository.snapshots.load(repository.snapshots.resolve("latest"))
        above = repository.trees.entry(old.roots[0].entry.content, b"above")
        assert above is not None
        marked = msgspec.structs.replace(above, xattrs=((b"trusted.overlay.opaque", b"y"),))
        tree = writer.update_tree(old.roots[0].entry.content, {b"above": marked})
        entry = msgspec.structs.replace(old.roots[0].entry, content=tree.id)
        roots = (msgspec.structs.replace(old.roots[0], entry=entry),)
        writer.commit(
            SnapshotDraft(
                id=repository.snapshots.new_id(), time_ns=old.time_ns + 10**9, host="h", roots=roots
            )
        )
    result = made.run(
        "restore", "-s", "latest", "-p", str(made.root / "above/file"), "--no-special", "--json"
    )
    assert result.exit_code == 0, result.output
    assert os.listxattr(made.root / "above") == []
    assert [left["what"] for left in json.loads(result.stdout)["left_out"]] == [
        "attribute trusted.overlay.opaque"
    ]


# -- reading it


READERS = (
    ("list",),
    ("show", "latest"),
    ("verify", "latest", "--checksum"),
    ("verify", "--all", "--checksum"),
    ("check", "--read-data"),
    ("diff", "latest"),
    ("prune", "--dry-run"),
    ("check", "--repair"),
    ("--trust-repository", "check", "--repair"),
    ("--trust-repository", "hold", "latest"),
    ("--trust-repository", "prune"),
)


def files_of(repository: Path) -> list[str]:
    """Return every file of a repository by its path from the top."""
    found = []
    for top, _, files in os.walk(repository):
        found += [os.path.relpath(os.path.join(top, name), repository) for name in files]
    return sorted(found)


@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "link", "link to a pipe", "directory", "device", "second name"]
)
def test_foreign_files_in_a_repository_are_neither_awaited_nor_followed(tmp_path: Path, kind: str) -> None:
    """Reading commands neither wait for nor follow what stands in place of a stranger's repository file.

    Each command ends, with a message if it fails, and root's file outside keeps content, mode and all.
    """
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    made.snapshot({b"file": b"content" * 1000})
    made.run("hold", "latest")
    outside, pipe = tmp_path / "outside", tmp_path / "pipe"
    os.mkfifo(pipe)
    configuration = tmp_path / "ciuic.toml"
    configuration.touch(0o600)
    kept = made.path.with_name("kept")
    shutil.copytree(made.path, kept)
    names = [*files_of(kept), "index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal", "claim"]
    for name in dict.fromkeys(names):
        shutil.rmtree(made.path)
        shutil.copytree(kept, made.path)
        victim = made.path / name
        content = victim.read_bytes() if victim.exists() else b""
        outside.write_bytes(content + b"of root")
        outside.chmod(0o640)
        before = outside.stat()
        victim.unlink(missing_ok=True)
        plant(victim, kind, outside, pipe)
        give_away(made.path)
        os.chown(outside, 0, 0)
        for words in READERS:
            result = made.run(*words, env={"CIUIC_CONFIG": str(configuration)})
            assert result.exit_code in (0, 1, 3, 4, 7, 75), (name, words, result.output, result.exception)
            assert result.exception is None or isinstance(result.exception, SystemExit), (name, words)
        now = outside.stat()
        assert outside.read_bytes() == content + b"of root", name
        assert (now.st_mode, now.st_uid, now.st_size) == (before.st_mode, 0, before.st_size), name


def plant(victim: Path, kind: str, outside: Path, pipe: Path) -> None:
    """Put another object in place of a file."""
    if kind == "pipe":
        os.mkfifo(victim)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            # A socket's path has 107 bytes at most.
            directory = os.open(victim.parent, os.O_PATH)
            made.bind(f"/proc/self/fd/{directory}/{victim.name}")
            os.close(directory)
    elif kind == "directory":
        victim.mkdir()
    elif kind == "device":
        # Reads of /dev/zero never end.
        os.mknod(victim, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    elif kind == "second name":
        os.link(outside, victim)
    else:
        victim.symlink_to(outside if kind == "link" else pipe)


def test_the_index_of_a_stranger_is_not_opened(tmp_path: Path) -> None:
    """A stranger's index is not opened: listing and restoring use snapshot files and packs alone.

    In the hostile database `chunks` is a view that never ends, and the catalogue is false.
    """
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    made.snapshot({b"file": b"content" * 1000})
    index = made.path / "index.sqlite"
    with contextlib.closing(sqlite3.connect(index)) as db:
        db.executescript("""
            DROP TABLE chunks;
            CREATE VIEW chunks AS WITH RECURSIVE n(id) AS (SELECT x'00' UNION ALL SELECT id FROM n)
                SELECT id, 0 AS pack, 0 AS offset, 0 AS stored, 0 AS raw, 0 AS flags FROM n;
            UPDATE snapshots SET message = 'a lie';
            PRAGMA wal_checkpoint(TRUNCATE);
        """)
    give_away(made.path)
    result = made.run("list", "--json")
    assert result.exit_code == 0, result.output
    assert [snapshot["message"] for snapshot in json.loads(result.stdout)["snapshots"]] == [""]
    assert made.run("verify", "latest", "--checksum").exit_code == 0
    result = made.run("restore", "-s", "latest", "-p", str(made.root / "file"), "-d", str(tmp_path / "dest"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "dest/file").read_bytes() == b"content" * 1000


def test_no_content_of_roots_files_is_confirmed_by_a_repair(tmp_path: Path) -> None:
    """A repair does not put a block of a file that only root may read into a stranger's repository."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    secret = os.urandom(4096)
    (made.root / "secret").write_bytes(secret)
    (made.root / "secret").chmod(0o600)
    made.snapshot({b"secret": secret})
    for pack in (made.path / "packs").iterdir():
        data = pack.read_bytes()
        if secret in data:
            pack.write_bytes(data.replace(secret, bytes(4096)))
    kept = tmp_path / "kept"
    shutil.copytree(made.path, kept)
    # A repair of root's own repository does read it back.
    assert made.run("check", "--repair", "--read-data").exit_code == 0
    shutil.rmtree(made.path)
    shutil.copytree(kept, made.path)
    give_away(made.path)
    assert made.run("--trust-repository", "check", "--repair", "--read-data").exit_code == 4
    assert all(secret not in pack.read_bytes() for pack in (made.path / "packs").iterdir())
