"""The owner of the directory into which root restores: what they may do between any two system calls of the restore."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.destination_enemy import UID, DestinationEnemy
from support.hooked_os import hooked
from support.restoring import take

from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.restore import Overwrite, Result, execute, plan_restore
from ciuic.types import Snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users needs root")
SECRET = "only root may read this"


@pytest.fixture
def place(short_tmp: Path) -> Path:
    """A directory that every user can enter."""
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
    """`dest/root`, which the enemy owns as they do everything in it."""
    made = place / "dest"
    (made / "root").mkdir(parents=True)
    for path in (made, made / "root"):
        os.chown(path, UID, UID)
    return made


def own(*paths: Path, uid: int = UID, mode: int | None = None) -> None:
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
    """The recorded owner of a pipe is given to that pipe, not to root's file that was exchanged for it before it was opened."""
    root = place / "root"
    root.mkdir()
    os.mkfifo(root / "pipe")
    own(root / "pipe", mode=0o666)
    own(root)
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
    """Of two new directories the one that is recorded as the enemy's is not exchanged for the one that shuts the enemy out."""
    root = place / "root"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    secret_in(root / "a").chmod(0o644)  # only the directory protects it
    (root / "a").chmod(0o700)
    own(root / "b", mode=0o777)
    own(root, mode=0o755)
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
    """A directory of root that the restore has just finished, moved to a name that the snapshot records as the enemy's, stays
    root's; the restore says what it found."""
    root = place / "root"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    secret_in(root / "a").chmod(0o644)
    (root / "a").chmod(0o700)
    own(root / "b", mode=0o777)
    own(root, mode=0o755)
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
    """The content of a file that lends its group's rights (setgid) cannot be written by its owner before the bit is set."""
    root = place / "root"
    root.mkdir()
    (root / "tool").write_bytes(b"trusted content")
    os.chown(root / "tool", UID, 0)
    (root / "tool").chmod(0o2755)
    own(root)
    snapshot = take(repository, root)
    opened = []

    def before(call: str, number: int) -> None:
        opened.append(enemy.do("open_unfinished", dest))

    with hooked(before=before):
        restore(repository, snapshot, root, dest)
    assert set(opened) == {0}
    assert len(opened) > 20
    assert stat.S_IMODE((dest / "root/tool").stat().st_mode) == 0o2755


# -- what lies there beforehand


def test_a_socket_of_root_under_a_recorded_name_is_not_given_away(
    repository: Repository, place: Path, dest: Path
) -> None:
    """What is neither file nor directory has no content to know it by: one of another owner is replaced, not changed."""
    root = place / "root"
    root.mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(root / "control"))
    own(root / "control", mode=0o666)
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
    """Hard links to files outside, whose content is the same or another, keep content, owner and mode."""
    root, outside = place / "root", place / "outside"
    for path in (root, outside):
        path.mkdir()
    for name, content in (("same", b"the same"), ("other", b"of the snapshot")):
        (root / name).write_bytes(content)
        own(root / name, mode=0o644)
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
    """Whatever has the name of the mark, the restore is done, believes none of it, and leaves alone what it links to."""
    root = place / "root"
    root.mkdir()
    (root / "file").write_bytes(b"the right content")
    own(root / "file", mode=0o644)
    own(root)
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
    # Of the right size and time, as a restore that was cut short would have left it, and with wrong content.
    (dest / "root/file").write_bytes(b"the wrong content")
    own(dest / "root/file", mode=0o644)
    os.utime(dest / "root/file", ns=(5, (root / "file").stat().st_mtime_ns))
    with pytest.raises(CiuicError, match="exist"):
        restore(repository, snapshot, root, dest, overwrite=None)
    assert restore(repository, snapshot, root, dest).complete
    assert (dest / "root/file").read_bytes() == b"the right content"
    assert outside.read_text() == text
    assert not (place / "nothing").exists()


# -- the way to the destination


def test_a_link_to_what_is_not_its_owners_leads_no_restore_there(
    repository: Repository, place: Path, dest: Path, enemy: DestinationEnemy
) -> None:
    """A destination that the owner of its parent replaced by a link to a directory of root is refused before anything is made,
    also behind missing directories; a link to a directory of the link's owner is followed."""
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
    """Exchanged for a link to a directory of root before any system call of the restore, it is refused, or goes on where it is
    now; nothing is made outside."""
    root, outside = place / "root", place / "outside"
    for path in (root, outside):
        path.mkdir()
    (root / "file").write_bytes(b"content")
    snapshot = take(repository, root)
    new = dest / "new"
    at = swapped = 0
    while at < 200:
        new.mkdir()
        own(new)
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
    """Restored in place, what lies below a root that its owner has replaced by a link to a directory of root is refused; the
    root itself is restored in the place of the link."""
    root, outside = dest / "mine", place / "outside"
    for path in (root, outside):
        path.mkdir()
    (root / "file").write_bytes(b"content")
    own(root)
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
    """Its parent renamed in the middle of a restore, everything comes to lie in the directory that was opened; nothing with a
    temporary name is left, there or at the old place."""
    root = place / "root"
    (root / "below").mkdir(parents=True)
    for name in ("file", "below/file"):
        (root / name).write_bytes(b"content")
        own(root / name)
    own(root, root / "below")
    snapshot = take(repository, root)
    own(place)
    done = []

    def before(call: str, number: int) -> None:
        if not done and [*(dest / "root/below").glob(".ciuic-restore-*")]:
            done.append(enemy.do("move", dest, place / "moved"))

    (dest / "root/below").mkdir()
    own(dest / "root/below")
    with hooked(before=before):
        restore(repository, snapshot, root, dest)
    assert done == [True]
    assert (place / "moved/root/below/file").read_bytes() == b"content"
    assert not dest.exists()
    assert not list(place.rglob(".ciuic-restore*"))
