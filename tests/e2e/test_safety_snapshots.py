"""Repeated restores over a live root: safety snapshots are not the newest state nor replace one another."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import trees
from support.live import Live, installed
from support.until import until

from ciuic.repository import Repository
from ciuic.types import SAFETY_MESSAGE, TAG_INCOMPLETE, TAG_SAFETY, SnapshotDraft, SnapshotId

pytestmark = pytest.mark.mount

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
RETENTION = '\n[retention]\nkeep_within = "0"\nkeep_last = 3\nkeep_safety = "0"\n'


@pytest.fixture
def pruned(short_tmp: Path, root: Path) -> Iterator[Live]:
    """Provide a running daemon that keeps three ordinary snapshots and none for its age."""
    with Live(short_tmp, more_config=RETENTION) as live:
        live.run("protect", str(root))
        live.start(root)
        until("the first snapshot", live.list)
        yield live


def _script_of_the_page(root: Path) -> str:
    """Return the script that docs/cli.md shows, for directories of ``root``."""
    found = re.search(r"```sh\n(id=\$\(ciuic list.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1].replace("/opt/deepseek/training", str(root))


def test_the_script_of_the_page_can_be_run_twice(protected: Live, root: Path) -> None:
    """The second run of the page's script restores the good state again, not the first run's damage."""
    for name in ("checkpoints", "logs"):
        (root / name).mkdir()
        (root / name / "file").write_text("good")
    protected.snapshot()
    script = _script_of_the_page(root)
    environment = {**protected.env, "PATH": f"{installed().parent}:{os.environ['PATH']}"}
    for round_ in ("first", "second"):
        for name in ("checkpoints", "logs"):
            (root / name / "file").write_text(f"damage before the {round_} run")
        done = subprocess.run(
            ["sh", "-c", script], env=environment, cwd="/", check=False, capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert [(root / name / "file").read_text() for name in ("checkpoints", "logs")] == ["good", "good"]
    rows = protected.json("list", "--all")["snapshots"]
    assert [row["safety"] for row in rows].count(True) == 4
    marked = protected.run("list", "--machine-readable", "--all").stdout.decode().splitlines()
    assert [line.endswith("|safety") for line in marked] == [row["safety"] for row in rows]
    newest = protected.json("show", "latest")["id"]
    assert newest == protected.list()[0].id == next(row["id"] for row in rows if not row["safety"])


def test_four_restores_and_a_prune_keep_the_source_and_the_first_undo(pruned: Live, root: Path) -> None:
    """Restores of four directories leave four safety snapshots outside keep_last; the first still undoes."""
    names = ("one", "two", "three", "four")
    for name in names:
        (root / name).mkdir()
        (root / name / "file").write_text("good")
    old = pruned.snapshot()
    between = [pruned.snapshot() for _ in range(2)]
    source = pruned.snapshot()
    for name in names:
        (root / name / "file").write_text("bad")
    taken = [
        pruned.json("restore", "-s", source, "-p", str(root / name), "--overwrite")["safety_snapshot"]
        for name in names
    ]
    (root / "elsewhere").write_text("the job goes on")
    pruned.run("prune")
    ids = [row["id"] for row in pruned.json("list", "--all")["snapshots"]]
    assert set(ids) == {source, *between, *taken}
    assert old not in ids
    pruned.run("restore", "-s", taken[0], "-p", str(root / "one"), "--overwrite", "--no-safety")
    assert (root / "one" / "file").read_text() == "bad"


def test_undo_takes_back_what_a_restore_changed_and_nothing_else(protected: Live, root: Path) -> None:
    """What a restore replaced, removed and made is as before; what others changed elsewhere stays; a second undo does it again."""
    for name in ("replaced", "kept"):
        (root / name).mkdir()
        (root / name / "file").write_text("old")
    (root / "gone").mkdir()
    (root / "gone" / "file").write_text("old")
    snapshot = protected.snapshot()
    (root / "replaced" / "file").write_text("newer")
    (root / "replaced" / "added").write_text("added")
    (root / "gone" / "file").unlink()
    (root / "gone").rmdir()
    done = protected.run(
        "restore",
        "-s",
        snapshot,
        "-p",
        str(root / "replaced"),
        "-p",
        str(root / "gone"),
        "--overwrite",
        "--delete",
    )
    command = re.search(r"to undo this restore: ciuic (undo cs-[0-9a-f]+)", done.stderr.decode())
    assert command is not None
    (root / "kept" / "file").write_text("changed since")
    after = trees.manifest(root)
    assert (root / "gone" / "file").read_text() == "old"
    assert not (root / "replaced" / "added").exists()

    rehearsed = protected.json("undo", "--dry-run")
    assert rehearsed["removed"] == [{"path": str(root / "gone")}]
    trees.assert_same(after, trees.manifest(root))
    protected.run(*command[1].split())
    assert (root / "replaced" / "file").read_text() == "newer"
    assert (root / "replaced" / "added").read_text() == "added"
    assert not (root / "gone").exists()
    assert (root / "kept" / "file").read_text() == "changed since"

    protected.run("undo")
    found = trees.manifest(root)
    # The restored directories were made anew, in the root and in themselves.
    assert {path: facts for path, facts in found.items() if path != b"."} == {
        path: facts for path, facts in after.items() if path != b"."
    }


def test_undo_of_a_restore_that_only_made_something(protected: Live, root: Path) -> None:
    """A directory that was missing before the restore is removed, and a mistake in the id is told."""
    protected.run("undo", expect=3)
    (root / "gone").mkdir()
    (root / "gone" / "file").write_text("old")
    snapshot = protected.snapshot()
    (root / "gone" / "file").unlink()
    (root / "gone").rmdir()
    protected.run("restore", "-s", snapshot, "-p", str(root / "gone"))
    assert b"no safety snapshot" in protected.run("undo", snapshot, expect=2).stderr
    protected.run("undo")
    assert not (root / "gone").exists()
    protected.run("undo")
    assert (root / "gone" / "file").read_text() == "old"


def test_undo_removes_nothing_that_its_snapshot_did_not_see(protected: Live, root: Path) -> None:
    """What lay on another file system before a restore, or could not be read, is not taken for something that the restore made."""
    (root / "data").mkdir()
    (root / "data" / "file").write_text("old")
    (root / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", root / "disk"], check=True, timeout=30)
    try:
        (root / "disk" / "file").write_text("precious")
        snapshot = protected.snapshot()
        protected.run(
            "restore",
            "-s",
            snapshot,
            "-p",
            str(root / "data" / "file"),
            "-d",
            str(root / "disk"),
            "--overwrite",
        )
        said = protected.run("undo", expect=8).stderr.decode()
        assert str(root / "disk" / "file") in said
        assert "not removed" in said
        assert (root / "disk" / "file").exists()
    finally:
        subprocess.run(["umount", "-l", root / "disk"], check=True, timeout=30)
    with Repository.open(protected.repository) as repository, repository.writer() as writer:
        taken = repository.snapshots.load(repository.snapshots.resolve(snapshot))
        message = f"{SAFETY_MESSAGE}{snapshot}"
        draft = SnapshotDraft(
            id=SnapshotId.parse("cs-fafafa"), time_ns=time.time_ns(), host=taken.host, roots=taken.roots,
            parent=taken.id, tags=(TAG_SAFETY, TAG_INCOMPLETE), message=message,
        )  # fmt: skip
        writer.commit(draft)
    (root / "data" / "unreadable then").write_text("precious")
    (root / "data" / "file").write_text("changed")
    words = ("restore", "-s", "cs-fafafa", "-p", str(root), "--overwrite", "--delete", "--dry-run")
    assert b"--delete removes what it lacks" in protected.run(*words).stderr
    assert b"could not be read" in protected.run("undo", "cs-fafafa").stderr
    assert (root / "data" / "unreadable then").read_text() == "precious"
    assert (root / "data" / "file").read_text() == "old"


def test_a_restore_that_changes_nothing_offers_no_undo(protected: Live, root: Path) -> None:
    """Where everything is as the snapshot has it, the restore says so, and `undo` finds no restore."""
    (root / "file").write_text("same")
    snapshot = protected.snapshot()
    done = protected.run("restore", "-s", snapshot, "-p", str(root), "--overwrite")
    assert "nothing was changed" in done.stderr.decode()
    assert "ciuic undo" not in done.stderr.decode()
    assert b"no restore to undo" in protected.run("undo", expect=3).stderr
