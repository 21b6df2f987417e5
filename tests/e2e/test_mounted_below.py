"""Other file systems, and other parts of the same one, mounted below a root: no command enters, changes or removes them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.ci import needs
from support.live import Live, emptied_root
from support.overlay import DRIVER
from support.small_disks import missing, small_disk

pytestmark = pytest.mark.mount

Mount = Callable[[Path], "Foreign"]


class Foreign(NamedTuple):
    """Something mounted below a root: its place, and what it looked like when it was mounted."""

    place: Path
    before: list[tuple[str, int, int, int, bytes]]
    blocks: int
    """Size of its file system, in blocks."""

    def assert_untouched(self) -> None:
        """Fail where anything on it has changed, its top's mode and times included."""
        assert _facts(self.place) == self.before


def _facts(top: Path) -> list[tuple[str, int, int, int, bytes]]:
    found = []
    for path in [top, *sorted(top.rglob("*"))]:
        facts = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        found.append((str(path.relative_to(top)), facts.st_mode, facts.st_uid, facts.st_mtime_ns, content))
    return found


def _furnish(top: Path) -> None:
    (top / "deep" / "er").mkdir(parents=True)
    (top / "precious").write_text("precious")
    (top / "deep" / "er" / "file").write_text("precious, too")
    top.chmod(0o751)
    os.utime(top, ns=(10**18, 10**18))


@pytest.fixture(params=["tmpfs", "bind", "file"])
def mount(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Mount]:
    """Provide a function that mounts a tmpfs, a directory or a file of the root's own file system at a path."""
    kind: str = request.param
    mounted: list[Path] = []

    def at(place: Path) -> Foreign:
        source = short_tmp / f"elsewhere{len(mounted)}"
        if kind == "file":
            # The place of a directory may be taken: a file beside it stands for it.
            place = place / "one-file" if place.is_dir() else place
            place.touch()
            source.write_text("precious")
            source.chmod(0o640)
        else:
            place.mkdir(exist_ok=True)
            source.mkdir()
        words = ["-t", "tmpfs", "none"] if kind == "tmpfs" else ["--bind", str(source)]
        subprocess.run(["mount", *words, str(place)], check=True, timeout=30)
        mounted.append(place)
        if kind != "file":
            _furnish(place)
        return Foreign(place, _facts(place), os.statvfs(place).f_blocks)

    yield at
    # The test's daemon has ended when its fixture did, and with it what was mounted over the place.
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", str(place)], check=False, timeout=30, capture_output=True)


def _restore(live: Live, snapshot: str, *arguments: str) -> None:
    # 8 where the snapshot has something at the mount's place, which is then named as not restored.
    done = live.run("restore", "-s", snapshot, *arguments, "--overwrite", "--delete", expect=None)
    assert done.returncode in (0, 8), done.stderr


def _spoil(root: Path) -> None:
    (root / "file").write_text("damage")
    (root / "extra").mkdir(exist_ok=True)
    (root / "extra" / "file").write_text("extra")


def _assert_restored(root: Path) -> None:
    assert (root / "file").read_text() == "good"


def test_mounted_before_the_daemon(short_tmp: Path, root: Path, mount: Mount) -> None:
    """A mount that the snapshot knows, and one below a directory that it does not know, survive through the overlay."""
    (root / "file").write_text("good")
    known = mount(root / "known")
    with Live(short_tmp) as live:
        live.run("protect", str(root))
        live.start(root)
        snapshot = live.snapshot()
        live.stop()
        (root / "new").mkdir()
        unknown = mount(root / "new" / "disk")
        live.start(root)
        for foreign in (known, unknown):
            found = live.run("doctor", str(foreign.place), expect=None).stdout.decode()
            assert f"is on another file system, mounted at {foreign.place}" in found
            if DRIVER != "pyfuse3":
                # pyfuse3 is not told which file `df` asks about.
                assert os.statvfs(foreign.place).f_blocks == foreign.blocks
        _spoil(root)
        _restore(live, snapshot, "-p", str(root))
        _assert_restored(root)
        assert not (root / "extra").exists()
        known.assert_untouched()
        unknown.assert_untouched()
        for path in (known.place, unknown.place):
            live.run("restore", "-s", snapshot, "-p", str(path), "--overwrite", "--delete", expect=None)
            path.lstat()
        known.assert_untouched()
        unknown.assert_untouched()
        live.stop()
        known.assert_untouched()
        unknown.assert_untouched()


def test_mounted_over_a_served_directory(short_tmp: Path, root: Path, mount: Mount) -> None:
    """A mount made while the root is served, over a directory that the snapshot has with content, is left alone and named."""
    (root / "file").write_text("good")
    (root / "data").mkdir()
    (root / "data" / "one-file").write_text("of the root")
    with Live(short_tmp) as live:
        live.run("protect", str(root))
        live.start(root)
        snapshot = live.snapshot()
        foreign = mount(root / "data")
        later = live.snapshot()
        _spoil(root)
        for taken in (snapshot, later):
            done = live.run(
                "restore", "-s", taken, "-p", str(root), "--overwrite", "--delete", "--json", expect=8
            )
            assert str(foreign.place) in done.stdout.decode()
            foreign.assert_untouched()
        _assert_restored(root)
        if foreign.place.is_dir():
            # Nothing is restored into what is mounted there now, named or not.
            inside = live.run(
                "restore", "-s", snapshot, "-p", str(root / "data" / "one-file"), "--overwrite", expect=None
            )
            assert inside.returncode == 1
            assert b"another file system is mounted" in inside.stderr
        changes = live.json("diff", snapshot)
        assert not [change for change in changes["changes"] if "precious" in change["path"]]
        foreign.assert_untouched()


def test_mounted_below_another_destination(shared: Live, short_tmp: Path, mount: Mount) -> None:
    """A mount in the destination of `-d` survives --delete."""
    root = emptied_root(shared)
    (root / "file").write_text("good")
    (root / "data").mkdir()
    (root / "data" / "one-file").write_text("of the root")
    snapshot = shared.snapshot()
    dest = short_tmp / "dest"
    (dest / root.name / "data").mkdir(parents=True)
    (dest / root.name / "unknown").mkdir()
    over, beside = mount(dest / root.name / "data"), mount(dest / root.name / "unknown")
    _restore(shared, snapshot, "-p", str(root), "-d", str(dest))
    _assert_restored(dest / root.name)
    over.assert_untouched()
    beside.assert_untouched()


def test_subvolumes_below_a_root(short_tmp: Path, tmp_path: Path) -> None:
    """A btrfs subvolume is a border through the overlay as well: one that the snapshot does not know keeps what it has."""
    needs(missing("btrfs") or ("" if shutil.which("btrfs") else "btrfs is not installed"))
    with small_disk(tmp_path, "btrfs") as disk:
        root = disk / "root"
        root.mkdir()
        (root / "file").write_text("good")
        (root / "replaced").mkdir()
        (root / "replaced" / "one-file").write_text("of the root")
        with Live(short_tmp) as live:
            live.run("protect", str(root))
            live.start(root)
            snapshot = live.snapshot()
            live.stop()
            shutil.rmtree(root / "replaced")
            (root / "new").mkdir()
            foreign = [_subvolume(root / name) for name in ("replaced", "subvolume", "new/subvolume")]
            live.start(root)
            _spoil(root)
            later = live.snapshot()
            for taken in (snapshot, later):
                _restore(live, taken, "-p", str(root))
                for one in foreign:
                    one.assert_untouched()
            _restore(live, later, "-p", str(foreign[0].place))
            foreign[0].assert_untouched()
            changes = live.json("diff", snapshot)
            assert not [change for change in changes["changes"] if "precious" in change["path"]]
            found = live.run("doctor", str(foreign[0].place), expect=None).stdout.decode()
            assert "is on another file system" in found


def _subvolume(place: Path) -> Foreign:
    subprocess.run(["btrfs", "subvolume", "create", str(place)], check=True, timeout=30, capture_output=True)
    _furnish(place)
    return Foreign(place, _facts(place), 0)


def test_a_directory_mounted_beside_itself(short_tmp: Path, root: Path) -> None:
    """A bind mount inside the root is one place of the snapshot, not two, and a restore in place is complete."""
    (root / "source").mkdir()
    (root / "source" / "file").write_text("good")
    (root / "bound").mkdir()
    subprocess.run(["mount", "--bind", root / "source", root / "bound"], check=True, timeout=30)
    try:
        with Live(short_tmp) as live:
            live.run("protect", str(root))
            live.start(root)
            snapshot = live.snapshot()
            (root / "source" / "file").write_text("damage")
            live.run("restore", "-s", snapshot, "-p", str(root), "--overwrite", "--delete")
            assert (root / "source" / "file").read_text() == "good"
            shown = live.json("show", snapshot, str(root))
            assert [entry["mountpoint"] for entry in shown["entries"]] == [True, False]
            # A change by the other name is the same file's.
            for text in ("by the other name", "once more"):
                # Only what is changed from here on is tracked for the next snapshot.
                live.snapshot()
                (root / "bound" / "file").write_text(text)
                later = live.snapshot()
                (root / "source" / "file").write_text("damage")
                live.run("restore", "-s", later, "-p", str(root), "--overwrite", "--delete")
                assert (root / "source" / "file").read_text() == text
            assert "without passing the overlay" in live.run("status").stdout.decode()
    finally:
        subprocess.run(["umount", "-l", root / "bound"], check=False, timeout=30, capture_output=True)
        shutil.rmtree(root, ignore_errors=True)
