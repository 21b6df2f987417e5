"""`[[snapshot_when]]` with a real daemon and overlay: renames, new names and closed files cut snapshots by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.live import Live
from support.overlay import overlay_over
from support.until import until

from ciuic.protocol.worker_frames import WatchedNames

pytestmark = pytest.mark.mount

_RULES = """
[[snapshot_when]]
renamed = "*.safetensors"
least_between = "1s"

[[snapshot_when]]
appears = "COMPLETE"
least_between = "1s"

[[snapshot_when]]
closed = "*.pt"
least_between = "1s"
"""


def of_events(live: Live) -> list[dict[str, Any]]:
    """Return the snapshots of events, oldest first."""
    return list(reversed(live.json("list", "--tag", "event")["snapshots"]))


def test_a_thousand_renames_give_one_snapshot(protected: Live, root: Path) -> None:
    """Each kind of event cuts once, however often it happens at a time, and the snapshot has what was complete."""
    protected.config.write_text(protected.config.read_text() + _RULES)
    protected.run("reload")
    # The workers count from the daemon's next look on: this name comes again until it is seen.
    seen = root / "COMPLETE"

    def first() -> list[dict[str, Any]]:
        seen.write_bytes(b"")
        seen.unlink()
        return of_events(protected)

    until("a snapshot of the first event", first)
    before = len(of_events(protected))
    for number in range(1000):
        (root / "new").write_bytes(b"%d" % number)
        (root / "new").rename(root / f"{number}.safetensors")
    until("the snapshot of the renames", lambda: _with(protected, "renamed"))
    (root / "step").mkdir()
    with open(root / "step" / "model.pt", "wb") as file:
        file.write(b"weights")
    until("the snapshot of the closed file", lambda: _with(protected, "closed"))
    found = of_events(protected)[before:]
    messages = [one["message"] for one in found if "appears" not in one["message"]]
    assert messages == ["renamed *.safetensors", "closed *.pt"]
    (renamed,) = [one for one in found if one["message"] == "renamed *.safetensors"]
    assert renamed["files"] == 1000


def _with(live: Live, kind: str) -> list[dict[str, Any]]:
    return [one for one in of_events(live) if one["message"].startswith(kind)]


@pytest.mark.full
def test_a_worker_counts_what_it_is_told(short_tmp: Path) -> None:
    """Every way in which a name comes to be, is renamed to or is closed counts once; counts are taken away."""
    root = short_tmp / "r"
    root.mkdir()
    with overlay_over(root, short_tmp / "control") as overlay:
        wanted = WatchedNames(rules=(("renamed", "*.x"), ("appears", "*.x"), ("closed", "*.x")), dirty=True)

        def counted() -> tuple[int, ...]:
            return overlay.client.name_events(wanted).counts

        assert counted() == (0, 0, 0)
        (root / "a").write_bytes(b"1")
        assert counted() == (0, 0, 0)
        (root / "a").rename(root / "b.x")
        assert counted() == (1, 1, 0)
        os.link(root / "b.x", root / "c.x")
        (root / "d.x").mkdir()
        (root / "e.x").symlink_to("b.x")
        os.mkfifo(root / "f.x")
        assert counted() == (0, 4, 0)
        with open(root / "g.x", "wb") as file:
            file.write(b"1")
            assert counted() == (0, 1, 0)
        until("the end of the writer", lambda: counted() == (0, 0, 1))
        (root / "g.x").read_bytes()
        assert counted() == (0, 0, 0)
        (root / "g.x").unlink()
        found = overlay.client.name_events(wanted)
        assert (found.counts, found.lost) == ((0, 0, 0), (1, 1, 1))
        (root / "h").write_bytes(b"1")
        (root / "h").rename(root / "h.x")
        os.link(root / "h.x", root / "i")
        (root / "h.x").unlink()
        (root / "i").rename(root / "i.x")
        assert overlay.client.name_events(wanted).lost == (0, 0, 0)
        (root / "i.x").unlink()
        assert overlay.client.name_events(wanted).lost == (1, 1, 1)
        (root / "j.x").write_bytes(b"1")
        overlay.client.cut()
        (root / "j.x").unlink()
        assert overlay.client.name_events(wanted).lost == (0, 0, 0)
        assert overlay.client.name_events(WatchedNames(rules=())).counts == ()


def test_what_is_written_to_an_open_file_counts_at_once(short_tmp: Path) -> None:
    """Bytes that pass the worker by are in the count while the file is still open."""
    root = short_tmp / "r"
    root.mkdir()
    with overlay_over(root, short_tmp / "control") as overlay:
        wanted = WatchedNames(rules=(), dirty=True)
        assert overlay.client.name_events(wanted).dirty_bytes == 0
        with open(root / "file", "wb", buffering=0) as file:
            file.write(bytes(1 << 20))
            assert overlay.client.name_events(wanted).dirty_bytes >= 1 << 20
