"""Attacker: the owner of a tree, and of directories above it, who exchanges them while root works there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.live import Live
from support.restoring import take
from support.second_user import MADE_UP, run_as
from support.until import until

from ciuic.artefacts.folder import ExportFolder
from ciuic.compare.diff import LiveNode
from ciuic.config import load_config
from ciuic.errors import CiuicError
from ciuic.fuse_layer.system import mounts
from ciuic.lazy.service import LazyRestore
from ciuic.repository import Repository
from ciuic.system import mountinfo
from ciuic.training.convert.destination import DestinationExists, new_directory
from ciuic.view.mount import MountedView
from ciuic.view.tree import ViewTree

pytestmark = pytest.mark.mount


@pytest.fixture
def live(short_tmp: Path) -> Iterator[Live]:
    """Provide a configured ciuic in a directory that every user can enter."""
    for path in (short_tmp, short_tmp.parent):
        path.chmod(0o755)
    with Live(short_tmp) as one:
        yield one


def _owned(*paths: Path) -> None:
    for path in paths:
        path.mkdir()
        os.chown(path, MADE_UP.uid, MADE_UP.gid)


def test_an_undo_removes_nothing_through_a_link(live: Live, short_tmp: Path) -> None:
    """What a restore has made is removed from the root itself, not from where a link that was put above the root leads."""
    home, victim = short_tmp / "home", short_tmp / "victim"
    _owned(home, home / "above", home / "above/root", home / "above/root/d")
    root = home / "above/root"
    (root / "d/file").write_text("of the user")
    (victim / "root/d").mkdir(parents=True)
    (victim / "root/d/file").write_text("of root")
    victim.chmod(0o700)
    live.run("protect", str(root))
    live.start(root)
    until("the first snapshot", live.list)
    live.snapshot()
    (root / "d/file").unlink()
    live.run("restore", "-s", "latest", "-p", str(root / "d/file"))
    assert (root / "d/file").exists()
    swap = "os.rename('above', 'aside'); os.symlink(sys.argv[2], 'above')"
    assert run_as(MADE_UP, f"os.chdir(sys.argv[1]); {swap}", str(home), str(victim)).returncode == 0
    live.run("undo", expect=8)
    assert (victim / "root/d/file").read_text() == "of root"


_PLANT = """
os.chdir(sys.argv[1])
(made,) = [name for name in os.listdir() if name.startswith(".")]
os.rename(made, "aside")
os.mkdir(made)
if sys.argv[2]:
    os.symlink(sys.argv[2], f"{made}/config.json")
"""


@pytest.mark.parametrize("moment", ["made", "written to"])
def test_an_export_follows_no_name_that_is_exchanged(
    live: Live, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The owner of an export's destination has root write into the export's own directory and nowhere else."""
    home, victim = short_tmp / "home", short_tmp / "victim"
    _owned(home)
    victim.write_text("of root")

    def exchange(link: str) -> None:
        done = run_as(MADE_UP, _PLANT, str(home), link)
        assert done.returncode == 0, done.stderr

    if moment == "made":
        mkdir = os.mkdir

        def attacked(*arguments: object, **options: object) -> None:
            mkdir(*arguments, **options)  # type: ignore[arg-type]
            monkeypatch.undo()
            exchange("")

        monkeypatch.setattr(os, "mkdir", attacked)
        with (
            pytest.raises(CiuicError, match="another user exchanges"),
            new_directory(home / "model", overwrite=False, names=("*.json",)),
        ):
            raise AssertionError("it is written to")
    else:
        with new_directory(home / "model", overwrite=False, names=("*.json",)) as made:
            exchange(str(victim))
            (made / "config.json").write_text("of the snapshot")
        assert (home / "aside/config.json").read_text() == "of the snapshot"
    assert victim.read_text() == "of root"


def test_an_export_that_replaces_another_removes_only_what_exports_write(live: Live, short_tmp: Path) -> None:
    """A directory of root that takes the name of the replaced one keeps what is in it."""
    home = short_tmp / "home"
    _owned(home)
    private = home / "private"
    (private / "below").mkdir(parents=True, mode=0o700)
    (private / "note").write_text("of root")
    (home / "model").mkdir()
    with new_directory(home / "model", overwrite=True, names=("*.json",)) as made:
        done = run_as(
            MADE_UP, "os.chdir(sys.argv[1]); os.rmdir('model'); os.rename('private', 'model')", str(home)
        )
        assert done.returncode == 0, done.stderr
        (made / "config.json").write_text("new")
    assert (home / "model/config.json").read_text() == "new"
    assert len(list(home.rglob("note"))) == len(list(home.rglob("below"))) == 1


def test_a_comparison_does_not_look_through_another_users_link(live: Live, short_tmp: Path) -> None:
    """Root is told no names of a directory to which somebody's link above a root leads."""
    victim = short_tmp / "victim"
    (victim / "root").mkdir(parents=True)
    link = short_tmp / "above"
    link.symlink_to(victim)
    os.chown(link, MADE_UP.uid, MADE_UP.gid, follow_symlinks=False)
    with pytest.raises(CiuicError, match=f"symbolic link of user {MADE_UP.uid}"):
        LiveNode.at(os.fsencode(link / "root"))
    os.chown(victim, MADE_UP.uid, MADE_UP.gid)
    with LiveNode.at(os.fsencode(link / "root")) as live_node:
        assert live_node.entry is not None


def test_a_shell_does_not_take_roots_rights_from_an_exchanged_root(live: Live, short_tmp: Path) -> None:
    """A directory of root that its parent's owner has put in a root's place does not have programs of the snapshot run as root."""
    home = short_tmp / "home"
    _owned(home, home / "root")
    (home / "of-root").mkdir()
    with Repository.create(live.repository) as repository:
        take(repository, home / "root")
    exchange = "os.chdir(sys.argv[1]); os.rename('root', 'aside'); os.rename('of-root', 'root')"
    assert run_as(MADE_UP, exchange, str(home)).returncode == 0
    done = live.run("--trust-repository", "shell", "--at", "latest", "id", "-u", expect=1)
    assert done.stdout == b""
    assert b"belongs to user 0 now" in done.stderr
    assert (
        live.run("--trust-repository", "shell", "--at", "latest", "--user", "0", "id", "-u").stdout == b"0\n"
    )
    shutil.rmtree(home / "root")
    os.rename(home / "aside", home / "root")
    assert (
        live.run("--trust-repository", "shell", "--at", "latest", "id", "-u").stdout == b"%d\n" % MADE_UP.uid
    )


def test_what_is_mounted_is_detached_where_it_is_by_then(live: Live, short_tmp: Path) -> None:
    """A lazy restore ends with a plain directory, and a view leaves no dead mount, also where a directory above was renamed."""
    home = short_tmp / "home"
    _owned(home, home / "root", home / "above")
    (home / "root/file").write_text("of the user")
    rename = "os.chdir(sys.argv[1]); os.rename('above', 'moved')"

    def exchange(_: object) -> None:
        assert run_as(MADE_UP, rename, str(home)).returncode == 0

    with Repository.create(live.repository) as repository:
        snapshot = take(repository, home / "root")
        LazyRestore(
            repository,
            snapshot,
            os.fsencode(home / "root"),
            os.fsencode(home / "above"),
            status_directory=short_tmp,
        ).run(exchange)
        assert (home / "moved/root/file").read_text() == "of the user"
        _owned(home / "above", home / "above/view")
        (home / "moved").rename(home / "restored")
        tree = ViewTree(repository.snapshots, lambda _: repository, snapshot.id)
        view = MountedView(tree, os.fsencode(home / "above/view"), lambda _: None, for_others=False)
        exchange(None)
        view.close()
    below = os.fsencode(home)
    assert [mount for mount in mountinfo.read() if mount.mount_point.startswith(below)] == []


@pytest.mark.parametrize(
    ("words", "destination"),
    [
        (("drill", "--scratch"), "scratch"),
        (("shell", "--scratch"), "scratch"),
        (("copy",), "copy"),
    ],
)
def test_root_puts_no_files_below_another_users_directory(
    live: Live, short_tmp: Path, words: tuple[str, ...], destination: str
) -> None:
    """What root restores for itself, or copies, does not lie where another user may exchange it meanwhile."""
    home, root = short_tmp / "home", short_tmp / "root"
    _owned(home)
    root.mkdir()
    (root / "file").write_text("of root")
    with Repository.create(live.repository) as repository:
        take(repository, root)
    if words[-1] == "--scratch":
        (home / destination).mkdir()
    last = ("true",) if words[0] == "shell" else ()
    trust = ("--trust-repository",) if words[0] == "shell" else ()
    done = live.run(*trust, *words, str(home / destination), *last, expect=7)
    assert b"owned by another user" in done.stderr
    assert [path for path in home.rglob("*") if path.name != destination] == []


def test_an_artefact_is_not_begun_behind_a_link(live: Live, short_tmp: Path) -> None:
    """Root makes no directory for an artefact where another user's link leads."""
    home, victim = short_tmp / "home", short_tmp / "victim"
    _owned(home)
    victim.mkdir()
    (home / "above").symlink_to(victim)
    os.chown(home / "above", MADE_UP.uid, MADE_UP.gid, follow_symlinks=False)
    with pytest.raises(CiuicError, match=f"symbolic link of user {MADE_UP.uid}"):
        ExportFolder(home / "above/artefact")
    assert list(victim.iterdir()) == []


def test_a_link_above_a_root_names_no_other_root(live: Live, short_tmp: Path) -> None:
    """Root neither protects nor stops protecting a directory of somebody else to which another user's link leads."""
    home, other = short_tmp / "home", short_tmp / "other"
    _owned(home, home / "above", home / "above/root")
    (other / "root").mkdir(parents=True)
    live.run("protect", str(home / "above/root"), str(other / "root"))
    exchange = "os.chdir(sys.argv[1]); os.rename('above', 'aside'); os.symlink(sys.argv[2], 'above')"
    assert run_as(MADE_UP, exchange, str(home), str(other)).returncode == 0
    live.run("unprotect", str(home / "above/root"))
    assert [root.path for root in load_config(live.config).roots] == [other / "root"]
    live.run("unprotect", str(other / "root"))
    done = live.run("protect", str(home / "above/root"), expect=1)
    assert f"symbolic link of user {MADE_UP.uid}".encode() in done.stderr
    assert load_config(live.config).roots == ()


def test_an_export_whose_name_was_taken_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    """What was written is removed, and what has the name stays."""

    def export() -> None:
        with new_directory(tmp_path / "model", overwrite=False, names=("*.json",)) as made:
            (made / "config.json").write_text("of the snapshot")
            (tmp_path / "model").mkdir()
            (tmp_path / "model/other").write_text("of somebody")

    with pytest.raises(DestinationExists):
        export()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model/other").read_text() == "of somebody"


def test_of_mounts_made_at_one_time_each_is_found_by_where_its_path_leads(tmp_path: Path) -> None:
    """Also where the path is a symbolic link, which the table of mounts does not have."""
    places = [tmp_path / "a", tmp_path / "b"]
    before = mounts.mounts_of("tmpfs")
    with ExitStack() as closing:
        for place in places:
            place.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True, timeout=30)
            closing.callback(subprocess.run, ["umount", "-l", place], check=True, timeout=30)
            (tmp_path / f"to-{place.name}").symlink_to(place)
        for place in places:
            found = mounts.new_mount("tmpfs", before, os.fsencode(tmp_path / f"to-{place.name}"))
            assert found is not None
            assert found.mount_point == os.fsencode(place)
        assert mounts.new_mount("tmpfs", before, os.fsencode(tmp_path / "gone")) is None
