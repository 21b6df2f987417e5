"""Restores with another user at work in the same directory: between every two system calls he looks, or changes something."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.hooked_os import hooked
from support.restore_enemy import GROUP, OWNER, SWAPS, Enemy, attacked, make_tree, race, restore
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
    """A directory that every user can come to."""
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
    """Files that let in different people, in every way there is; and a directory that only its owner enters."""
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
    """Notes every file that a watcher could open though the original keeps him out."""

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
        """Everything under its final name, and everything that has no name yet, which nobody may open but root and,
        once it is his, the owner of some file."""
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
        """The original of a temporary file, by its content (no two are equal)."""
        data = Path(path).read_bytes()
        folder = original / os.path.basename(os.path.dirname(path)) if "closed" in path else original
        for other in everything_below(folder):
            if os.path.isfile(other) and Path(other).read_bytes() == data:
                return other
        return "unknown"


@pytest.mark.parametrize("there", ["nothing", "a default acl", "other modes", "other owners", "other acls"])
def test_nobody_is_let_in_on_the_way(
    repository: Repository, place: Path, watchers: list[Watcher], there: str
) -> None:
    """After every system call of a restore, five users try to open every file in the destination, temporary names too:
    none opens what the original keeps from him, whatever stood there before and whatever the directory hands down."""
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
    """What the restore finds. Directories are open to all, so that everything in them can be tried on the way."""
    if there == "a default acl":
        (dest / "root/closed").mkdir(parents=True)
        for folder in (dest / "root", dest / "root/closed"):
            _acl(folder, "u:2222:rwx", "g:4321:rwx", "o::rwx", default=True)
    elif there != "nothing":
        shutil.copytree(original, dest / "root")  # contents and times as they were
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
    """What somebody could open before the restore is not its doing."""
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
    """Before some system call of a restore by root (every eighth is tried; all by the torture), a name in the destination
    becomes a symbolic link to somebody else's directory, or that directory, for good or for some calls: nothing out there
    is made, changed or removed, and nothing of it is in the destination."""
    root = place / "root"
    root.mkdir()
    make_tree(root)
    snapshot = take(repository, root)
    calls = attacked(place, repository, snapshot, swap, 0, 0)
    assert calls > 100
    for at in range(1 + SWAPS.index(swap) % 8, calls, 8):
        attacked(place, repository, snapshot, swap, at, (0, 1, 4)[at % 3])


def test_another_user_exchanges_names_as_fast_as_he_can(place: Path) -> None:
    """For two seconds of restores by root, the owner of the destination exchanges names in it in a loop."""
    figure = race(place, 2.0, seed=1)
    assert figure.exchanges > 100
    assert figure.restores > 3


def test_a_directory_of_somebody_else_is_not_taken_for_the_one_just_made(
    repository: Repository, place: Path
) -> None:
    """Exchanged for a directory just made in a directory of the enemy, somebody's private directory gets neither the recorded
    owner nor a file."""
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
