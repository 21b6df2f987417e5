"""Attacker: a local user who owns the root, and perhaps directories above it.

The owner prepares, replaces, links and keeps it open. Root writes nowhere else and reads nothing of the
owner's as state. Each test checks a directory of mode 0700 that belongs to root: nothing may appear or change
in it.

The attacker is a living process that carries out one system call at a time, and keeps descriptors.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.ci import needs
from support.overlay import Overlay
from support.second_user import _BECOME, MADE_UP, LivingProgram, User
from support.small_disks import missing, small_disk

from ciuic import STATE_DIR_NAME
from ciuic.config.repository_mark import mark_of, read_mark, write_mark
from ciuic.daemon.capture.process import _find_undo
from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore
from ciuic.fuse_layer.system import mounts
from ciuic.fuse_layer.system.mounts import NotTheRoot
from ciuic.protocol import state_directory

_ACT = """
uid, gid, groups = json.loads(sys.stdin.readline())
become(uid, gid, groups)
os.umask(0)
kept = {}
def place(path):
    name, slash, rest = path.partition("/")
    return f"/proc/self/fd/{kept.get(name[1:], -1)}{slash}{rest}" if name.startswith("@") else path
def act(what, arguments):
    paths = [place(argument) if isinstance(argument, str) else argument for argument in arguments]
    if what == "keep":
        kept[arguments[1]] = os.open(paths[0], os.O_PATH)
    elif what == "symlink":
        os.symlink(arguments[0], paths[1])
    elif what == "write":
        with open(paths[0], "wb") as file:
            file.write(arguments[1].encode())
    elif what == "overwrite":
        with open(paths[0], "r+b", buffering=0) as file:
            file.write(arguments[1].encode())
    elif what == "read":
        with open(paths[0], "rb") as file:
            return file.read().decode("latin-1")
    elif what == "listdir":
        return os.listdir(paths[0])
    else:
        return getattr(os, what)(*paths)
print("ready", flush=True)
for line in sys.stdin:
    what, *arguments = json.loads(line)
    try:
        result = act(what, arguments)
        print(json.dumps([0, result if isinstance(result, (str, list)) else None]), flush=True)
    except OSError as error:
        print(json.dumps([error.errno, None]), flush=True)
"""


class HostileUser(LivingProgram):
    """Process of ``user``. A path that begins with ``@name`` is below the descriptor kept under that name."""

    def __init__(self, user: User) -> None:
        super().__init__(_BECOME + _ACT)
        self.user = user
        self.ask([user.uid, user.gid, list(user.groups)])

    def __call__(self, what: str, *arguments: object) -> int:
        """Carry out ``os.<what>`` or one of keep, write, overwrite, read, listdir; return 0 or the errno."""
        number: int = json.loads(self.ask([what, *map(_plain, arguments)]))[0]
        return number

    def read(self, path: os.PathLike[str] | str) -> str | None:
        """Return the content of a file as the user sees it, or None if it may not be read."""
        number, text = json.loads(self.ask(["read", os.fspath(path)]))
        return None if number else text


def _plain(argument: object) -> object:
    return os.fspath(argument) if isinstance(argument, os.PathLike) else argument


pytestmark = pytest.mark.mount
NAME = os.fsdecode(STATE_DIR_NAME)
EPOCHS = range(1, 4)
ROOT = Credentials(0, 0)


class Scene(NamedTuple):
    """A directory that only root enters, and a root that the attacker owns."""

    top: Path
    canary: Path
    root: Path


@contextmanager
def _scene(owned: str = "home/root") -> Iterator[Scene]:
    """Return a scene; the first directory of ``owned``, the root's path, and all below are the attacker's."""
    top = Path(tempfile.mkdtemp(prefix="ciuic-owner-", dir="/tmp"))
    try:
        top.chmod(0o755)
        canary, root = top / "canary", top / owned
        canary.mkdir(mode=0o700)
        (canary / "secret").write_text("secret of root")
        root.mkdir(parents=True)
        for path in (top / owned.split("/")[0], *(top / owned.split("/")[0]).rglob("*")):
            os.chown(path, MADE_UP.uid, MADE_UP.gid)
        yield Scene(top, canary, root)
    finally:
        shutil.rmtree(top)


@pytest.fixture(params=["root", "home/root", "home/deep/root"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with _scene(request.param) as made:
        yield made


@pytest.fixture
def attacker() -> Iterator[HostileUser]:
    with HostileUser(MADE_UP) as user:
        yield user


def _plant(attacker: HostileUser, scene: Scene, undo: str, victims: list[Path]) -> None:
    """Plant symbolic links out of the undo directory under every name that a worker will write."""
    names = [undo_format.LOG_NAME, *(undo_format.sealed_name(epoch) + ".tmp" for epoch in EPOCHS)]
    names += [undo_format.blocks_name(path.stat().st_ino, epoch) for path in victims for epoch in EPOCHS]
    for name in names:
        attacker("symlink", scene.canary / f"planted-{name}", f"{undo}/{name}")


def _untouched(scene: Scene) -> None:
    assert os.listdir(scene.canary) == ["secret"]
    assert (scene.canary / "secret").read_text() == "secret of root"


def test_a_state_directory_prepared_by_the_owner_is_never_used(scene: Scene, attacker: HostileUser) -> None:
    """A state directory prepared by the owner is never used.

    The attack that once wrote files as root: directories made beforehand, a descriptor kept, links planted,
    and content overwritten while a snapshot is pending.
    """
    files = [scene.root / f"file{number}" for number in range(4)]
    for file in files:
        attacker("write", file, "chosen by the attacker" * 500)
    for below in ("", "/undo", "/undo/hold", "/open"):
        attacker("mkdir", f"{scene.root}/{NAME}{below}")
    attacker("keep", scene.root / NAME / "undo", "undo")
    _plant(attacker, scene, "@undo", files)
    with Overlay(scene.root, scene.top / "w.sock") as overlay:
        _plant(attacker, scene, "@undo", files)
        for _ in EPOCHS:
            overlay.client.cut()
            for file in files:
                assert attacker("overwrite", file, "changed") == 0
            assert attacker("truncate", str(files[0]), 3) == 0
        assert overlay.client.status().abandoned == ()
        (aside,) = overlay.client.status().set_aside
        assert (overlay.backing / os.fsdecode(aside) / "undo").is_dir()
    _untouched(scene)


def test_state_lies_where_only_root_renames(scene: Scene, attacker: HostileUser) -> None:
    """The directory with the state is root's at every level; the owner cannot enter, move or replace it."""
    with Overlay(scene.root, scene.top / "w.sock"):
        container = scene.top / NAME
        assert container.is_dir()
        for path in (container, *container.rglob("*")):
            facts = path.lstat()
            assert facts.st_uid == 0
            assert stat.S_IMODE(facts.st_mode) & 0o077 == 0
        assert attacker("rename", container, scene.top / "away") != 0
        assert attacker("listdir", container) != 0
        assert attacker("rmdir", container) != 0


@pytest.fixture
def mount_root() -> Iterator[Scene]:
    """Provide a root that is the top of its mount, so that no state can lie beside it."""
    needs(missing("ext4"))
    with _scene("nothing") as made, small_disk(made.top, "ext4") as point:
        os.chown(point, MADE_UP.uid, MADE_UP.gid)
        yield made._replace(root=point)


def test_a_state_directory_replaced_by_the_owner_of_the_root_is_set_aside(
    mount_root: Scene, attacker: HostileUser
) -> None:
    """A state directory moved or replaced by the owner of a root that fills its mount is set aside.

    The owner puts links, files or directories in its place, between two sessions and, by a descriptor kept,
    during one. Every cut is exact or abandoned, and nothing else is written.
    """
    scene = mount_root
    root, file = scene.root, scene.root / "file"
    attacker("write", file, "first" * 2000)
    attacker("keep", root, "behind")
    for number, trick in enumerate(("nothing", "directories", "link", "file", "moved back", "mounted")):
        if trick != "nothing":
            assert attacker("rename", root / NAME, root / f"away{number}") == 0
        if trick == "directories":
            for below in ("", "/undo", "/undo/hold"):
                attacker("mkdir", f"{root}/{NAME}{below}")
            _plant(attacker, scene, f"{root}/{NAME}/undo", [file])
        elif trick == "link":
            attacker("symlink", scene.canary, root / NAME)
        elif trick == "file":
            attacker("write", root / NAME, "a file")
        elif trick == "moved back":
            assert attacker("rename", root / "away1", root / NAME) == 0
        elif trick == "mounted":
            attacker("mkdir", root / NAME)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "none", root / NAME], check=True)
            with pytest.raises(AssertionError, match="cannot be renamed"):
                Overlay(root, scene.top / f"{number}.sock").stop()
            subprocess.run(["umount", root / NAME], check=True)
            os.rmdir(root / NAME)
            assert os.listdir(scene.canary) == ["secret"]
        with Overlay(root, scene.top / f"{number}.sock") as overlay:
            assert bool(overlay.client.status().set_aside) == (trick in ("directories", "link", "file"))
            overlay.client.cut()
            attacker("rename", f"@behind/{NAME}", f"@behind/behind{number}")
            attacker("mkdir", f"@behind/{NAME}")
            attacker("mkdir", f"@behind/{NAME}/undo")
            _plant(attacker, scene, f"@behind/{NAME}/undo", [file])
            assert attacker("overwrite", file, f"round {number}") == 0
            assert overlay.client.status().abandoned == ()
            attacker("rename", f"@behind/{NAME}", f"@behind/planted{number}")
            attacker("rename", f"@behind/behind{number}", f"@behind/{NAME}")
        _untouched(scene)


def test_a_repository_under_the_reserved_name_is_not_taken_for_state(
    mount_root: Scene, attacker: HostileUser
) -> None:
    """A repository of root's that the owner renames to the reserved name is neither used nor removed."""
    scene = mount_root
    repository = scene.root / "repository"
    repository.mkdir(mode=0o700)
    (repository / "undo").mkdir()
    (repository / "config").write_text("precious")
    assert attacker("rename", repository, scene.root / NAME) == 0
    with Overlay(scene.root, scene.top / "w.sock") as overlay:
        (aside,) = overlay.client.status().set_aside
    mounts.remove_state(str(scene.root))
    kept = scene.root / os.fsdecode(aside)
    assert sorted(os.listdir(kept)) == ["config", "undo"]
    assert (kept / "config").read_text() == "precious"
    assert not (scene.root / NAME).exists()


def test_state_is_private_despite_default_acls_and_setgid(scene: Scene, attacker: HostileUser) -> None:
    """State is private although the owner's directories have default ACLs and the setgid bit."""
    acl = f"default:user:{MADE_UP.uid}:rwx,default:mask::rwx"
    for path in (scene.root, scene.root.parent):
        subprocess.run(["setfacl", "-m", acl, path], check=True)
        path.chmod(0o2755)
    with Overlay(scene.root, scene.top / "w.sock") as overlay:
        attacker("write", scene.root / "file", "old")
        overlay.client.cut()
        attacker("overwrite", scene.root / "file", "new")
        for path in scene.top.rglob(f"{NAME}/**/*"):
            assert attacker("listdir", path) != 0
            assert attacker.read(path) is None


def test_a_symbolic_link_on_the_way_to_a_root_is_refused(scene: Scene, attacker: HostileUser) -> None:
    """A root replaced by a symbolic link after it was configured, or one below such a link, is refused.

    Otherwise root would mount over its own directories.
    """
    for path in (scene.root, scene.root.parent):
        if path == scene.top:
            continue
        assert attacker("rename", path, f"{path}.away") == (0 if path.parent != scene.top else 13)
        if path.exists():
            continue
        attacker("symlink", scene.canary, path)
        with pytest.raises((NotTheRoot, OSError)):
            mounts.open_backing(str(scene.root))
        path.unlink()
        assert attacker("rename", f"{path}.away", path) == 0


def test_an_overlay_is_detached_by_identity_not_by_path(scene: Scene, attacker: HostileUser) -> None:
    """An overlay is detached by its identity: a mount to which a link in the path now leads stays."""
    point = scene.canary / "mounted"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)
    try:
        link = scene.top / "link"
        link.symlink_to(scene.canary)
        with pytest.raises(OSError, match="Invalid argument"):
            mounts.detach(str(link / "mounted"))
        assert os.path.ismount(point)
    finally:
        subprocess.run(["umount", point], check=True)
        link.unlink()
        point.rmdir()


def test_a_repository_mark_made_by_the_owner_has_no_effect(scene: Scene, attacker: HostileUser) -> None:
    """A mark of the owner's making neither stops root from making a repository nor names another place."""
    attacker("mkdir", scene.root / NAME)
    fd = os.open(scene.root, os.O_PATH)
    try:
        attacker("write", scene.root / NAME / "repository", "\x93\xc4\x01/\xc4\x01/\xa1x")
        assert read_mark(fd) is None
        with pytest.raises(FileNotFoundError):
            write_mark(fd, mark_of(scene.top / "r", "f" * 32, []))
        os.close(state_directory.open_state(fd).fd)
        mark = mark_of(scene.top / "r", "f" * 32, [])
        write_mark(fd, mark)
        assert read_mark(fd) == mark
    finally:
        os.close(fd)


TRICKS = (
    "mkdir root/{state}",
    "mkdir root/{state}/undo",
    "mkdir root/{state}/undo/hold",
    "rename root/{state} root/away{n}",
    "rename root root.away{n}",
    "rename root.away{n} root",
    "mkdir root",
    "symlink {canary} root/{state}",
    "symlink {canary} root",
    "symlink {canary}/x root/{state}/undo/log",
    "keep root kept",
    "keep root/{state} kept",
    "mkdir @kept/{state}",
    "mkdir @kept/undo",
    "rename @kept/{state} @kept/gone{n}",
    "symlink {canary}/y @kept/undo/log",
    "symlink {canary}/y @kept/log",
    "link root/file root/{state}/tracking",
    "unlink root/{state}",
    "rmdir root/{state}",
)


class OwnerMachine(RuleBasedStateMachine):
    """Model of the owner's tricks in any order, before, between and during sessions of the overlay core."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = _scene()
        self.scene = self.stack.__enter__()
        self.attacker = HostileUser(MADE_UP)
        self.core: OverlayCore | None = None
        self.fd = -1
        self.tricks = 0
        self.umask = os.umask(0)

    @initialize()
    def furnish(self) -> None:
        self.attacker("write", self.scene.root / "file", "old content" * 1000)

    @rule(trick=st.sampled_from(TRICKS), number=st.integers(0, 2))
    def play(self, trick: str, number: int) -> None:
        words = trick.format(state=NAME, canary=self.scene.canary, n=number).split()
        home = self.scene.root.parent
        self.attacker(
            words[0], *(w if w.startswith(("@", "/")) or w == "kept" else f"{home}/{w}" for w in words[1:])
        )
        self.tricks += 1

    @precondition(lambda self: self.core is None)
    @rule()
    def start(self) -> None:
        try:
            self.fd = mounts.open_backing(str(self.scene.root))
        except (OSError, NotTheRoot):
            return
        self.core = OverlayCore(self.fd, session="0" * 32, block_size=4096)

    @precondition(lambda self: self.core is not None)
    @rule()
    def cut_and_change(self) -> None:
        assert self.core is not None
        cut = self.core.cut()
        try:
            attr = self.core.names.lookup(ROOT_ID, b"file")
        except OSError:
            return
        handle = self.core.files.open(attr.node, os.O_RDWR)
        try:
            self.core.files.write(handle, 0, b"new")
        finally:
            self.core.files.release(handle)
            self.core.nodes.forget(attr.node, 1)
        if not self.core.status()["abandoned"]:
            undo = _find_undo(self.fd)
            assert os.path.exists(f"/proc/self/fd/{undo}/{undo_format.sealed_name(cut.epoch)}")
            os.close(undo)

    @precondition(lambda self: self.core is not None)
    @rule(clean=st.booleans())
    def stop(self, clean: bool) -> None:
        assert self.core is not None
        if clean:
            self.core.save_tracking()
        self.core.close()
        os.close(self.fd)
        self.core = None

    @precondition(lambda self: self.core is None)
    @rule()
    def unprotect(self) -> None:
        mounts.remove_state(str(self.scene.root))

    def teardown(self) -> None:
        try:
            if self.core is not None:
                self.stop(True)
            _untouched(self.scene)
        finally:
            os.umask(self.umask)
            self.attacker.__exit__(None, None, None)
            self.stack.__exit__(None, None, None)


TestOwnerMachine = OwnerMachine.TestCase
TestOwnerMachine.settings = settings(stateful_step_count=25, deadline=None)
