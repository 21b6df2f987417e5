"""Snapshots of a large tree cost what changed, not what exists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.live import Live

pytestmark = [pytest.mark.mount, pytest.mark.slow]

FILES = 20_000


def test_the_second_snapshot_of_20_000_files_reads_the_ten_that_changed(
    live: Live, root: Path, short_tmp: Path
) -> None:
    """A second snapshot of 20,000 files in one directory opens the ten changed ones and no other."""
    many = root / "many"
    many.mkdir()
    for number in range(FILES):
        with open(many / f"{number:06d}", "w") as file:
            file.write(str(number))
    live.run("protect", str(root))
    live.start(root)
    first = live.snapshot_until_tracking()
    changed = [many / f"{number:06d}" for number in range(5, FILES, FILES // 10)]
    for path in changed:
        path.write_text("changed")
    second = live.snapshot()
    facts = live.json("diff", first, second)
    text = str(facts)
    assert all(os.fspath(path) in text or path.name in text for path in changed)
    rows = {row.id: row for row in live.list()}
    assert rows[second].size_bytes - rows[first].size_bytes == sum(
        7 - len(str(int(path.name))) for path in changed
    )
    captures = {event["id"]: event for event in live.events("snapshot_committed")}
    assert captures[second]["files_read"] == len(changed)
    assert captures[second]["bytes_read"] == len("changed") * len(changed)
    assert set(captures[second]["modes"].values()) == {"tracked"}
    # A changed name rewrites its leaf of the tree and the nodes above, some kilobytes each, and nothing else.
    assert captures[second]["new_bytes"] < 20_000 * len(changed)
    live.run("restore", "-s", second, "-p", str(many), "-d", str(short_tmp / "out"), timeout_seconds=300)
    assert len(os.listdir(short_tmp / "out/many")) == FILES
    assert (short_tmp / "out/many" / changed[3].name).read_text() == "changed"
    assert (short_tmp / "out/many/000004").read_text() == "4"
