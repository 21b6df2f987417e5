"""An operator's script: parse the list, verify the newest snapshot, restore several directories in place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import Live, installed
from support.trees import ODD_NAMES, assert_same, make_everything, manifest

pytestmark = pytest.mark.mount

FIELD_SCRIPT = r"""
import datetime, os, subprocess, sys
program, *paths = sys.argv[1:]
out = subprocess.run([program, "list", "--machine-readable"], check=True, capture_output=True, text=True).stdout
snapshots = []
for line in out.splitlines():
    snapshot, moment, size = line.split("|")
    snapshots.append((datetime.datetime.strptime(moment, "%Y-%m-%d %H:%M:%S"), snapshot, int(size)))
# Of those of one second the first line is the newest.
newest = max(snapshots, key=lambda entry: entry[0])[1]
subprocess.run([program, "verify", newest, "--checksum"], check=True)
for path in paths:
    subprocess.run([program, "restore", "-s", newest, "-p", path, "-d", os.path.dirname(path), "--overwrite"], check=True)
print("RESTORED", newest)
"""


def _ruin(folder: Path) -> None:
    """Change, truncate or delete every file below; add none."""
    for number, (place, folders, files) in enumerate(os.walk(os.fsencode(folder), topdown=False)):
        for name in files:
            path = place + b"/" + name
            if os.path.islink(path) or not os.path.isfile(path) or number % 2:
                os.unlink(path)
            else:
                os.chmod(path, 0o600)
                os.truncate(path, 1)
        for name in folders:
            if not os.listdir(place + b"/" + name):
                os.rmdir(place + b"/" + name)


@pytest.mark.parametrize("program", ["ciuic", "ciuric"])
def test_the_script_brings_back_exactly_the_directories_it_names(
    protected: Live, root: Path, program: str
) -> None:
    """The script restores bytes, modes, owners, times, xattrs and links of the named directories only."""
    for name in ("first", "second", "untouched"):
        (root / name).mkdir()
        make_everything(root / name, seed=len(name))
    snapshot = protected.snapshot()
    before = {name: manifest(root / name) for name in ("first", "second")}
    for name in ("first", "second", "untouched"):
        _ruin(root / name)
    (root / "untouched/new").write_text("made after the snapshot")
    shutil.rmtree(root / "second")
    untouched = manifest(root / "untouched")

    script = [str(protected.top / "script.py")]
    Path(script[0]).write_text(FIELD_SCRIPT)
    done = subprocess.run(
        [sys.executable, *script, str(installed(program)), str(root / "first"), str(root / "second")],
        env=protected.env, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert snapshot in done.stdout
    for name, expected in before.items():
        assert_same(expected, manifest(root / name))
    assert_same(untouched, manifest(root / "untouched"))


@pytest.mark.full
def test_the_machine_readable_list_can_be_split_by_scripts(protected: Live, root: Path) -> None:
    """The machine-readable list has one line per snapshot, newest first, with three fields split by `|`.

    Sizes are in bytes, and nothing else is on stdout.
    """
    (at_start,) = protected.list()
    (root / "file").write_bytes(b"x" * 1000)
    first = protected.snapshot()
    (root / "more").write_bytes(b"y" * 234)
    second = protected.snapshot("-m", "with | in | the message\nand a newline", "--tag", "tagged")
    rows = protected.list()
    assert [row.id for row in rows] == [second, first, at_start.id]
    assert [row.size_bytes for row in rows] == [1234, 1000, 0]
    assert protected.list("ciuic") == protected.list("ciuric") == rows


def test_reading_commands_need_no_daemon(protected: Live, root: Path, short_tmp: Path) -> None:
    """Reading commands work without the daemon on the repository it left.

    Those are list, show, verify, diff, check and restore.
    """
    make_everything(root)
    snapshot = protected.snapshot()
    expected = manifest(root)
    protected.stop()
    # The plain files are visible.
    assert_same(expected, manifest(root))
    assert protected.list()[0].id == snapshot
    protected.run("show", snapshot, str(root))
    protected.run("verify", snapshot, "--checksum")
    protected.run("diff", snapshot)
    protected.run("check")
    protected.run("restore", "-s", snapshot, "-p", str(root), "-d", str(short_tmp / "out"))
    assert_same(expected, manifest(short_tmp / "out" / root.name))


@pytest.mark.full
def test_a_hole_comes_back_as_a_hole(protected: Live, root: Path, short_tmp: Path) -> None:
    """A 100 GiB file with a few written blocks is captured, verified and restored at the cost of these."""
    with open(root / "huge", "wb") as file:
        for offset in (0, 50 << 30, (100 << 30) - 5):
            file.seek(offset)
            file.write(b"data!")
    snapshot = protected.snapshot()
    protected.run("verify", snapshot, "--checksum")
    protected.run("restore", "-s", snapshot, "-p", str(root / "huge"), "-d", str(short_tmp / "out"))
    restored = short_tmp / "out/huge"
    assert restored.stat().st_size == 100 << 30
    assert restored.stat().st_blocks * 512 < 4 << 20
    with open(restored, "rb") as file:
        for offset in (0, 50 << 30, (100 << 30) - 5):
            file.seek(offset)
            assert file.read(5) == b"data!"


@pytest.mark.full
def test_odd_names_can_be_named_on_the_command_line(protected: Live, root: Path, short_tmp: Path) -> None:
    """A file whose name is not UTF-8, has a newline or `|`, or is 255 bytes long is restored by that name."""
    for number, name in enumerate(ODD_NAMES):
        with open(os.fsencode(root) + b"/" + name, "wb") as file:
            file.write(b"%d" % number)
    snapshot = protected.snapshot()
    for number, name in enumerate(ODD_NAMES):
        protected.run(
            "restore", "-s", snapshot, "-p", os.fsencode(root) + b"/" + name, "-d", str(short_tmp / "out")
        )
        with open(os.fsencode(short_tmp / "out") + b"/" + name, "rb") as file:
            assert file.read() == b"%d" % number
    listing = protected.run("show", snapshot, str(root))
    # The output is text whatever the names are.
    listing.stdout.decode("utf-8")
