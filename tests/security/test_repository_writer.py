"""Whoever writes a repository: what root may be made to do by restoring from it or by reading it."""

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
    """One of each kind of special file."""
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
    """A snapshot with one of each kind of special file, and a pipe, a sticky directory and a file that are none."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    sticky = Entry(name=b"sticky", mode=stat.S_IFDIR | 0o3777, **_FILE)
    pipe = Entry(name=b"pipe", mode=stat.S_IFIFO | 0o600, **_FILE)
    made.snapshot({**special_entries(), b"sticky": sticky, b"pipe": pipe, b"plain": b"content"})
    return made


def give_away(path: Path) -> None:
    """The repository belongs to another user from now on."""
    for folder, folders, files in os.walk(path):
        for name in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
            os.lchown(name, STRANGER, STRANGER)


def restored(
    repository: CliRepository, tmp_path: Path, *options: str, code: int
) -> tuple[Path, dict[str, str]]:
    """The restored root, and what the document says was left out, by name."""
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
    """Names below that lend rights."""
    found = set()
    for path in top.iterdir():
        mode = path.lstat().st_mode
        lends = stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID)
        if lends or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or os.listxattr(path, follow_symlinks=False):
            found.add(path.name)
    return found


def test_from_a_repository_of_root_everything_comes_back(repository: CliRepository, tmp_path: Path) -> None:
    """As it was: special files, bits and attributes are there, and nothing is said to be left out."""
    top, left_out = restored(repository, tmp_path, code=0)
    assert left_out == {}
    assert special_files(top) == set(LEFT_OUT)


def test_from_a_repository_of_somebody_else_nothing_special_comes_back(
    repository: CliRepository, tmp_path: Path
) -> None:
    """Each is named with what was left out, and the exit code is that of a restore in part; the rest is there."""
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
    """--special restores what a stranger's repository has, --no-special leaves out what root's own has; both end with 0."""
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
    """With --trust-repository the owner of the repository counts as root does."""
    give_away(repository.path)
    dest = tmp_path / "dest"
    result = repository.run(
        "--trust-repository", "restore", "-s", "latest", "-p", str(repository.root), "-d", str(dest)
    )
    assert result.exit_code == 0, result.output
    assert special_files(dest / "root") == set(LEFT_OUT)


def test_what_is_there_already_loses_its_rights(repository: CliRepository, tmp_path: Path) -> None:
    """Restored over itself without special files, bits and attributes are taken off, and devices that exist stay."""
    restored(repository, tmp_path, code=0)
    top, _ = restored(repository, tmp_path, "--no-special", "--overwrite", "--delete", code=0)
    assert special_files(top) == {"null", "disk"}


def test_a_dry_run_says_the_same(repository: CliRepository, tmp_path: Path) -> None:
    """Nothing is made, and the list is that of the restore."""
    give_away(repository.path)
    top, left_out = restored(repository, tmp_path, "--dry-run", code=8)
    assert left_out == LEFT_OUT
    assert not top.exists()


def test_the_list_is_also_for_people(repository: CliRepository, tmp_path: Path) -> None:
    """On stderr: each with its path, who may have written the repository, and what to give to have them."""
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
def test_a_repository_is_roots_own_only_if_nobody_else_may_change_it(
    repository: CliRepository, tmp_path: Path, where: str
) -> None:
    """Owner and mode of the directory, of what is first read in it, and of every directory on the way are looked at."""
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
    """A state directory that a repository has at the top of a root would be taken for the daemon's own: it is never restored;
    below that, and marks of restores, not from somebody else's repository."""
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


def test_a_single_special_file_can_be_asked_for(repository: CliRepository, tmp_path: Path) -> None:
    """-p of a device or of a file with a setuid bit is held to the same rule."""
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
    """Parents that come back in place get no special attributes of somebody else's snapshot."""
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
    """Every file of a repository, by its path from the top."""
    found = []
    for top, _, files in os.walk(repository):
        found += [os.path.relpath(os.path.join(top, name), repository) for name in files]
    return sorted(found)


@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "link", "link to a pipe", "directory", "device", "second name"]
)
def test_what_is_no_file_of_the_repository_is_neither_waited_for_nor_followed(
    tmp_path: Path, kind: str
) -> None:
    """Each file of a stranger's repository replaced in turn: every command ends, in words if it fails, and a file of root outside
    is as it was, content, mode and all."""
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
    """Something else by the name of a file."""
    if kind == "pipe":
        os.mkfifo(victim)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            directory = os.open(victim.parent, os.O_PATH)  # a socket's path has 107 bytes at most
            made.bind(f"/proc/self/fd/{directory}/{victim.name}")
            os.close(directory)
    elif kind == "directory":
        victim.mkdir()
    elif kind == "device":
        os.mknod(victim, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero: without end
    elif kind == "second name":
        os.link(outside, victim)
    else:
        victim.symlink_to(outside if kind == "link" else pipe)


def test_the_index_of_a_stranger_is_not_opened(tmp_path: Path) -> None:
    """A database in which `chunks` is a view that never ends, and the catalogue a lie: what is listed and restored is what snapshot
    files and packs say."""
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
    """A stranger's repository that lost a block of a file that only root may read does not get it from there."""
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
    assert made.run("check", "--repair", "--read-data").exit_code == 0  # root's own is healed
    shutil.rmtree(made.path)
    shutil.copytree(kept, made.path)
    give_away(made.path)
    assert made.run("--trust-repository", "check", "--repair", "--read-data").exit_code == 4
    assert all(secret not in pack.read_bytes() for pack in (made.path / "packs").iterdir())
