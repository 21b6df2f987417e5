"""Attacker: the owner of the directory into which root restores, between any two of its system calls.

The attacker is a real process that takes one step per request. Between two system calls of the restore it does what the kernel lets that user do, never with root's rights.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.restore_enemy import hooked
from support.restoring import take
from support.second_user import LivingProgram

from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.restore import Overwrite, Result, execute, plan_restore
from ciuic.types import Snapshot

UID = GID = 47_613
"""User and group id, which need not be in /etc/passwd."""

_PROGRAM = """
import ctypes, errno, json, os, stat, sys
uid, gid = map(int, sys.argv[1:])
os.setgroups([]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
libc = ctypes.CDLL(None, use_errno=True)

def temporaries(top):
    found = []
    for folder, folders, files in os.walk(top):
        found += [os.path.join(folder, name) for name in (*folders, *files) if name.startswith(".ciuic-restore-")]
    return found

def exchange(one, other):
    return libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0

def replace_pipes(top, by):
    for path in temporaries(top):
        if stat.S_ISFIFO(os.lstat(path).st_mode) and exchange(path, by):
            return True
    return False

def replace_directories(top, by):
    for path in temporaries(top):
        if stat.S_ISDIR(os.lstat(path).st_mode) and exchange(path, by):
            return True
    return False

held = []
def open_unfinished(top):
    for path in temporaries(top):
        try:
            held.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
        except OSError:
            pass
    return len(held)

def move(old, new):
    try:
        os.rename(old, new)
        return True
    except OSError:
        return False

def link_over(target, name):
    try:
        os.rename(name, name + ".aside")
        os.symlink(target, name)
        return True
    except OSError:
        return False

def reads(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("latin-1")
    except OSError as error:
        return errno.errorcode[error.errno]

print("ready", flush=True)
for line in sys.stdin:
    name, arguments = json.loads(line)
    try:
        answer = globals()[name](*arguments)
    except OSError as error:
        answer = str(error)
    print(json.dumps(answer), flush=True)
"""


class DestinationEnemy(LivingProgram):
    """Client of the living process."""

    def __init__(self, uid: int = UID) -> None:
        super().__init__(_PROGRAM, str(uid), str(uid))
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def do(self, step: str, *arguments: Path | str) -> Any:
        """Run one of the program's functions with these arguments as that user."""
        return json.loads(self.ask([step, [str(argument) for argument in arguments]]))


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users needs root")
SECRET = "only root may read this"


@pytest.fixture
def place(short_tmp: Path) -> Path:
    """Provide a directory that every user can enter."""
    for path in (short_tmp, short_tmp.parent):
        path.chmod(0o755)
    return short_tmp


@pytest.fixture
def repository(place: Path) -> Iterator[Repository]:
    with Repository.create(place / "repository", block_size=4096) as made:
        yield made


@pytest.fixture
def enemy() -> Iterator[DestinationEnemy]:
    with DestinationEnemy() as made:
        yield made


@pytest.fixture
def dest(place: Path) -> Path:
    """Provide `dest/root`, which the enemy owns with everything in it."""
    made = place / "dest"
    (made / "root").mkdir(parents=True)
    for path in (made, made / "root"):
        os.chown(path, UID, UID)
    return made


def make_owned(*paths: Path, uid: int = UID, mode: int | None = None) -> None:
    for path in paths:
        os.chown(path, uid, uid)
        if mode is not None:
            path.chmod(mode)


def restore(
    repository: Repository, snapshot: Snapshot, source: Path, dest: Path | None, **options: object
) -> Result:
    where = None if dest is None else os.fsencode(dest)
    chosen = {"overwrite": Overwrite.ALWAYS, **options}
    return execute(plan_restore(repository, snapshot, [os.fsencode(source)], where, **chosen))  # type: ignore[arg-type]


def secret_in(folder: Path, name: str = "mine") -> Path:
    made = folder / name
    made.write_text(SECRET)
    made.chmod(0o600)
    return made


def facts(path: Path) -> tuple[int, int]:
    st = path.lstat()
    return st.st_uid, st.st_mode


# -- names exchanged while something is being made


def test_a_pipe_that_is_being_made_does_not_give_away_a_file(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """The recorded owner of a pipe gets that pipe, not a file of root's exchanged for it before the open."""
    root = place / "root"
    root.mkdir()
    os.mkfifo(root / "pipe")
    make_owned(root / "pipe", mode=0o666)
    make_owned(root)
    snapshot = take(repository, root)
    mine = secret_in(dest / "root")
    ino = mine.stat().st_ino
    done = []

    def before(call: str, number: int) -> None:
        if not done and enemy.do("replace_pipes", dest, mine):
            done.append(call)

    with hooked(before=before):
        restore(repository, snapshot, root, dest)
    found = [path for path in (dest / "root").rglob("*") if path.lstat().st_ino == ino]
    assert [facts(path) for path in found] == [(0, stat.S_IFREG | 0o600)]
    assert enemy.do("reads", found[0]) == "EACCES"
    assert stat.S_ISFIFO((dest / "root/pipe").stat().st_mode)


def test_a_directory_that_is_being_made_does_not_give_away_another(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """A new directory recorded as the enemy's cannot be exchanged for one that shuts the enemy out."""
    root = place / "root"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    # Only the directory protects it.
    secret_in(root / "a").chmod(0o644)
    (root / "a").chmod(0o700)
    make_owned(root / "b", mode=0o777)
    make_owned(root, mode=0o755)
    snapshot = take(repository, root)

    def before(call: str, number: int) -> None:
        moved = dest / "root/was a"
        both = (dest / "root/b").exists() and not moved.exists()
        if both and enemy.do("move", dest / "root/a", moved):
            enemy.do("exchange", moved, dest / "root/b")
        enemy.do("replace_directories", dest, dest / "root/a")

    with hooked(before=before):
        restore(repository, snapshot, root, dest)
    for folder in (dest / "root").iterdir():
        assert enemy.do("reads", folder / "mine") in ("EACCES", "ENOENT"), folder
    holding = [path for path in (dest / "root").iterdir() if (path / "mine").exists()]
    assert [facts(path) for path in holding] == [(0, stat.S_IFDIR | 0o700)]


def test_a_directory_that_was_restored_is_not_given_away_under_a_later_name(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """A finished directory of root's, moved to a name that the snapshot records as the enemy's, stays root's.

    The restore reports what it found.
    """
    root = place / "root"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    secret_in(root / "a").chmod(0o644)
    (root / "a").chmod(0o700)
    make_owned(root / "b", mode=0o777)
    make_owned(root, mode=0o755)
    snapshot = take(repository, root)

    def before(call: str, number: int) -> None:
        if (dest / "root/a").exists() and not (dest / "root/b").exists():
            enemy.do("move", dest / "root/a", dest / "root/b")

    with hooked(before=before):
        result = restore(repository, snapshot, root, dest)
    assert facts(dest / "root/b") == (0, stat.S_IFDIR | 0o700)
    assert enemy.do("reads", dest / "root/b/mine") == "EACCES"
    assert [failure.path for failure in result.failed] == [os.fsencode(dest / "root/b")]
    assert "moved here" in result.failed[0].reason


def test_nothing_unfinished_can_be_opened_by_its_recorded_owner(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """The recorded owner of a setgid file cannot write its content before the bit is set."""
    root = place / "root"
    root.mkdir()
    (root / "tool").write_bytes(b"trusted content")
    os.chown(root / "tool", UID, 0)
    (root / "tool").chmod(0o2755)
    make_owned(root)
    snapshot = take(repository, root)
    opened = []

    def before(call: str, number: int) -> None:
        opened.append(enemy.do("open_unfinished", dest))

    with hooked(before=before):
        restore(repository, snapshot, root, dest)
    assert set(opened) == {0}
    assert len(opened) > 20
    assert stat.S_IMODE((dest / "root/tool").stat().st_mode) == 0o2755


# -- entries that exist beforehand


def test_a_socket_of_root_under_a_recorded_name_is_not_given_away(
    repository: Repository, place: Path, dest: Path
) -> None:
    """A socket of root's under a recorded name is replaced, not given to the recorded owner.

    A special file has no content to recognize it by, so one of another owner is never changed.
    """
    root = place / "root"
    root.mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(root / "control"))
    make_owned(root / "control", mode=0o666)
    snapshot = take(repository, root)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(dest / "root/control"))
        (dest / "root/control").chmod(0o600)
        before = os.open(dest / "root/control", os.O_PATH)
    try:
        restore(repository, snapshot, root, dest)
        old = os.fstat(before)
    finally:
        os.close(before)
    assert (old.st_uid, stat.S_IMODE(old.st_mode)) == (0, 0o600)
    assert facts(dest / "root/control") == (UID, stat.S_IFSOCK | 0o666)


def test_a_file_with_another_name_elsewhere_is_replaced_and_not_written(
    repository: Repository, place: Path, dest: Path
) -> None:
    """A file with hard links outside is replaced; the outside link keeps content, owner and mode."""
    root, outside = place / "root", place / "outside"
    for path in (root, outside):
        path.mkdir()
    for name, content in (("same", b"the same"), ("other", b"of the snapshot")):
        (root / name).write_bytes(content)
        make_owned(root / name, mode=0o644)
    (outside / "same").write_bytes(b"the same")
    (outside / "other").write_bytes(b"of root, outside")
    for name in ("same", "other"):
        (outside / name).chmod(0o600)
        os.link(outside / name, dest / "root" / name)
        os.utime(outside / name, ns=(5, (root / name).stat().st_mtime_ns))
    snapshot = take(repository, root)
    for overwrite in (Overwrite.ALWAYS, Overwrite.IF_CHANGED):
        assert restore(repository, snapshot, root, dest, overwrite=overwrite).complete
    for name in ("same", "other"):
        assert facts(outside / name) == (0, stat.S_IFREG | 0o600)
        assert (dest / "root" / name).read_bytes() == (root / name).read_bytes()
    assert (outside / "same").read_bytes() == b"the same"
    assert (outside / "other").read_bytes() == b"of root, outside"


@pytest.mark.parametrize(
    "kind", ["directory", "pipe", "socket", "link to nothing", "link", "file", "hard link"]
)
def test_a_planted_mark_of_a_restore_is_not_believed(
    repository: Repository, place: Path, dest: Path, kind: str
) -> None:
    """A planted mark of an unfinished restore is not believed, and the file it links to is left alone."""
    root = place / "root"
    root.mkdir()
    (root / "file").write_bytes(b"the right content")
    make_owned(root / "file", mode=0o644)
    make_owned(root)
    snapshot = take(repository, root)
    mark = dest / "root/.ciuic-restore"
    text = f'{{"snapshot": "{snapshot.id}", "source": "{os.fsencode(root).hex()}", "run": "{"ab" * 8}"}}'
    outside = place / "outside"
    outside.write_text(text)
    if kind == "directory":
        mark.mkdir()
    elif kind == "pipe":
        os.mkfifo(mark)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(mark))
    elif kind == "link to nothing":
        mark.symlink_to(place / "nothing")
    elif kind == "link":
        mark.symlink_to(outside)
    elif kind == "hard link":
        os.link(outside, mark)
    else:
        mark.write_text(text)
    os.lchown(mark, *((0, 0) if kind == "hard link" else (UID, UID)))
    # Right size and time, as an interrupted restore would have left it, and wrong content.
    (dest / "root/file").write_bytes(b"the wrong content")
    make_owned(dest / "root/file", mode=0o644)
    os.utime(dest / "root/file", ns=(5, (root / "file").stat().st_mtime_ns))
    with pytest.raises(CiuicError, match="exist"):
        restore(repository, snapshot, root, dest, overwrite=None)
    assert restore(repository, snapshot, root, dest).complete
    assert (dest / "root/file").read_bytes() == b"the right content"
    assert outside.read_text() == text
    assert not (place / "nothing").exists()


# -- the way to the destination


def test_a_destination_below_a_link_to_another_users_directory_is_refused(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """A destination below a link to root's directory is refused before anything is made.

    Also behind missing directories. A link to a directory of the link's owner is followed.
    """
    root, outside = place / "root", place / "outside"
    for path in (root, outside):
        path.mkdir()
    (root / "file").write_bytes(b"content")
    snapshot = take(repository, root)
    for name, target in (("out", outside), ("in", dest / "root")):
        (dest / name).symlink_to(target)
        os.lchown(dest / name, UID, UID)
    for where in (dest / "out", dest / "out/new/er"):
        with pytest.raises(CiuicError, match=f"symbolic link of user {UID}"):
            restore(repository, snapshot, root / "file", where)
    assert not list(outside.iterdir())
    assert restore(repository, snapshot, root / "file", dest / "in").complete
    assert (dest / "root/file").read_bytes() == b"content"


def test_a_destination_that_becomes_a_link_meanwhile_leads_nowhere(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """A destination exchanged for a link to root's directory before any system call leads to no file outside.

    The restore refuses it, or continues in the directory it opened.
    """
    root, outside = place / "root", place / "outside"
    for path in (root, outside):
        path.mkdir()
    (root / "file").write_bytes(b"content")
    snapshot = take(repository, root)
    new = dest / "new"
    at = swapped = 0
    while at < 200:
        new.mkdir()
        make_owned(new)
        at += 1
        done = []

        def before(call: str, number: int, at: int = at, done: list[bool] = done) -> None:
            if number == at:
                done.append(enemy.do("link_over", outside, new))

        try:
            with hooked(before=before) as count:
                restore(repository, snapshot, root, new)
        except CiuicError as error:
            assert "symbolic link" in error.message  # noqa: PT017
        assert not list(outside.iterdir())
        swapped += bool(done and done[0])
        if new.is_symlink():
            new.unlink()
        for path in (new, dest / "new.aside"):
            shutil.rmtree(path, ignore_errors=True)
        if count() < at:
            break
    assert swapped > 20


def test_a_root_that_became_a_link_is_not_restored_through_it(
    repository: Repository, place: Path, dest: Path
) -> None:
    """A restore in place refuses paths below a root that its owner replaced by a link to root's directory.

    The root itself is restored in place of the link.
    """
    root, outside = dest / "mine", place / "outside"
    for path in (root, outside):
        path.mkdir()
    (root / "file").write_bytes(b"content")
    make_owned(root)
    snapshot = take(repository, root)
    root.rename(dest / "aside")
    root.symlink_to(outside)
    os.lchown(root, UID, UID)
    with pytest.raises(CiuicError, match="symbolic link"):
        restore(repository, snapshot, root / "file", None)
    assert not list(outside.iterdir())
    assert restore(repository, snapshot, root, None).complete
    assert (root / "file").read_bytes() == b"content"
    assert not root.is_symlink()
    assert not list(outside.iterdir())


def test_a_destination_that_is_moved_is_followed_and_left_tidy(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """A destination moved during a restore gets everything, and no temporary name stays at either place."""
    root = place / "root"
    (root / "below").mkdir(parents=True)
    for name in ("file", "below/file"):
        (root / name).write_bytes(b"content")
        make_owned(root / name)
    make_owned(root, root / "below")
    snapshot = take(repository, root)
    make_owned(place)
    done = []

    def before(call: str, number: int) -> None:
        if not done and [*(dest / "root/below").glob(".ciuic-restore-*")]:
            done.append(enemy.do("move", dest, place / "moved"))

    (dest / "root/below").mkdir()
    make_owned(dest / "root/below")
    with hooked(before=before):
        restore(repository, snapshot, root, dest)
    assert done == [True]
    assert (place / "moved/root/below/file").read_bytes() == b"content"
    assert not dest.exists()
    assert not list(place.rglob(".ciuic-restore*"))
