"""Tests of restores with another user at work in the directory between every two system calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.restore_enemy import GROUP, OWNER, SWAPS, Enemy, attacked, hooked, make_tree, race, restore
from support.restoring import take
from support.second_user import User, Watcher, everything_below

from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.restore import Overwrite, execute, plan_restore
from ciuic.types import Snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users needs root")
USERS = (
    User(OWNER, OWNER),
    User(2222, 2222),
    User(3333, GROUP),
    User(3333, 3333, (GROUP,)),
    User(65534, 65534),
)
BIT_OF = {"owner": 0, "denied": 1, "group": 2, "supplementary": 3, "nobody": 4}


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory that every user can enter."""
    top = Path("/tmp") / f"ciuic-watched-{os.getpid()}"
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    top.chmod(0o755)
    yield top
    shutil.rmtree(top)


@pytest.fixture
def repository(place: Path) -> Iterator[Repository]:
    with Repository.create(place / "repository", block_size=4096) as made:
        yield made


@pytest.fixture
def watchers() -> Iterator[list[Watcher]]:
    made = [Watcher(user) for user in USERS]
    yield made
    for watcher in made:
        watcher.close()


def _acl(path: Path, *rules: str, default: bool = False) -> None:
    command = ["setfacl", *(["-d"] if default else []), "-m", ",".join(rules), str(path)]
    subprocess.run(command, check=True, timeout=30)


def _originals(root: Path) -> None:
    """Make files with every combination of access, and a directory that only its owner enters."""
    root.mkdir()
    root.chmod(0o755)
    for name, owner, mode in (
        ("public", OWNER, 0o644),
        ("private", OWNER, 0o600),
        ("for the group", OWNER, 0o640),
        ("not for the group", OWNER, 0o604),
        ("of root", 0, 0o600),
        ("setuid", 0, 0o4700),
        ("denied by acl", OWNER, 0o644),
        ("group is the mask", OWNER, 0o600),
    ):
        (root / name).write_bytes(os.urandom(5000))
        os.chown(root / name, owner, GROUP if owner else 0)
        (root / name).chmod(mode)
    _acl(root / "denied by acl", "u:2222:---", "m::rwx")
    _acl(root / "group is the mask", "u:2222:r--", "g::---", "m::rwx")
    closed = root / "closed"
    closed.mkdir()
    (closed / "open in there").write_bytes(b"only because nobody comes here")
    (closed / "open in there").chmod(0o644)
    os.chown(closed, OWNER, GROUP)
    closed.chmod(0o700)


def _restore(
    repository: Repository, snapshot: Snapshot, root: Path, dest: Path | None = None, **options: object
) -> None:
    where = None if dest is None else os.fsencode(dest)
    plan = plan_restore(repository, snapshot, [os.fsencode(root)], where, **options)  # type: ignore[arg-type]
    execute(plan)


class Witness:
    """Notes every file that a watching user could open although the original denies it."""

    def __init__(self, watchers: list[Watcher], root: Path) -> None:
        self.watchers = watchers
        paths = everything_below(root)
        self.may = {
            watcher.user: {os.stat(path).st_size: path for path in sorted(watcher.opens(paths))}
            for watcher in watchers
        }
        self.names = {watcher.user: watcher.opens(paths) for watcher in watchers}
        self.inodes: dict[int, str] = {}
        self.seen: set[tuple[User, str, str]] = set()
        self.looks = 0

    def look(self, restored: Path, original: Path, call: str) -> None:
        """Try to open everything under its final or a temporary name.

        A file without a name yet may be opened only by root and, once it is chowned, by its owner.
        """
        if not restored.exists():
            return
        self.looks += 1
        for path in everything_below(restored):
            if os.path.isdir(path):
                continue
            name = os.path.relpath(path, restored)
            for watcher in self.watchers:
                if not watcher.opens([path]):
                    continue
                twin = str(original / name)
                if os.path.basename(path).startswith(".ciuic-restore"):
                    twin = self._twin(path, original)
                if twin not in self.names[watcher.user]:
                    self.seen.add((watcher.user, name, call))

    def _twin(self, path: str, original: Path) -> str:
        """Return the original of a temporary file by its content (no two are equal)."""
        data = Path(path).read_bytes()
        folder = original / os.path.basename(os.path.dirname(path)) if "closed" in path else original
        for other in everything_below(folder):
            if os.path.isfile(other) and Path(other).read_bytes() == data:
                return other
        return "unknown"


@pytest.mark.parametrize("there", ["nothing", "a default acl", "other modes", "other owners", "other acls"])
def test_restore_lets_no_user_in(
    repository: Repository, place: Path, watchers: list[Watcher], there: str
) -> None:
    """Users cannot open a file during a restore, under any name, that the original denies them.

    After every system call five users try every file in the destination, temporary names too, whatever was
    there before and whatever default ACL the directory has.
    """
    original = place / "root"
    _originals(original)
    snapshot = take(repository, original)
    witness = Witness(watchers, original)
    dest = place / "dest"
    dest.mkdir()
    _prepare(dest, original, there)
    before = _open_already(watchers, dest / "root")
    with hooked(after=lambda call, number: witness.look(dest / "root", original, call)) as count:
        _restore(repository, snapshot, original, dest, overwrite=Overwrite.ALWAYS)
    assert {found for found in witness.seen if found[:2] not in before} == set()
    assert witness.looks > 30
    assert count() > 100
    assert {
        w.user: {os.path.relpath(p, dest / "root") for p in w.opens(everything_below(dest / "root"))}
        for w in watchers
    } == {w.user: {os.path.relpath(p, original) for p in witness.names[w.user]} for w in watchers}


def _prepare(dest: Path, original: Path, there: str) -> None:
    """Prepare what the restore finds; directories are open to all, so that everything can be tried."""
    if there == "a default acl":
        (dest / "root/closed").mkdir(parents=True)
        for folder in (dest / "root", dest / "root/closed"):
            _acl(folder, "u:2222:rwx", "g:4321:rwx", "o::rwx", default=True)
    elif there != "nothing":
        # The contents and times are as they were.
        shutil.copytree(original, dest / "root")
        for path in map(Path, everything_below(dest / "root")):
            if path.is_dir():
                continue
            if there == "other owners":
                os.chown(path, 0, 0)
                path.chmod(0o640)
            elif there == "other acls":
                path.chmod(0o700)
                _acl(path, "u:2222:---", "g::---", "o::r-x", "m::rwx")
            else:
                path.chmod(0)
    for path in map(Path, everything_below(dest)):
        if path.is_dir():
            path.chmod(0o755)


def _open_already(watchers: list[Watcher], top: Path) -> set[tuple[User, str]]:
    """Return what users could open before the restore, which is not its doing."""
    if not top.exists():
        return set()
    paths = everything_below(top)
    return {
        (watcher.user, os.path.relpath(path, top)) for watcher in watchers for path in watcher.opens(paths)
    }


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: f"{swap[0]} {swap[1]}")
def test_no_exchange_of_names_leads_a_restore_outside(
    repository: Repository, place: Path, swap: tuple[str, str]
) -> None:
    """Exchanging a name during a restore by root never makes it touch anything outside the destination.

    Before some system call (every eighth is tried; all by the torture) a name in the destination becomes a
    symbolic link to another user's directory, or that directory, for good or for some calls. Nothing outside
    is made, changed or removed, and nothing of it is in the destination.
    """
    root = place / "root"
    root.mkdir()
    make_tree(root)
    snapshot = take(repository, root)
    calls = attacked(place, repository, snapshot, swap, 0, 0)
    assert calls > 100
    for at in range(1 + SWAPS.index(swap) % 8, calls, 8):
        attacked(place, repository, snapshot, swap, at, (0, 1, 4)[at % 3])


def test_names_exchanged_in_a_loop_do_not_mislead_a_restore(place: Path) -> None:
    """The owner of the destination exchanges names in a loop for two seconds of restores by root, in vain."""
    figure = race(place, 2.0, seed=1)
    assert figure.exchanges > 100
    assert figure.restores > 3


def test_exchanged_private_directory_gets_neither_owner_nor_file(repository: Repository, place: Path) -> None:
    """A private directory exchanged for one just made gets neither the recorded owner nor a file."""
    root, dest = place / "root", place / "attack/dest"
    root.mkdir()
    make_tree(root)
    snapshot = take(repository, root)
    (dest / "root/folder").mkdir(parents=True)
    for path in (dest, dest / "root", dest / "root/folder"):
        os.chown(path, OWNER, GROUP)
    enemy = Enemy(place / "attack", dest)
    calls = ["", ""]

    def before(call: str, number: int) -> None:
        if calls[-1] == "renameat2" and (dest / "root/folder/below").exists():
            enemy.swap("root/folder/below", "private")
        calls.append(call)

    with hooked(before=before), suppress(CiuicError):
        restore(repository, snapshot, root, dest)
    enemy.check_private()
    assert not (enemy.links / "private/note").exists(), "the exchange did not take place"
