"""Each root has its own age, risk and next time, and its first snapshot comes with its protection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live import Live
from support.until import until

pytestmark = pytest.mark.mount


def _roots(live: Live) -> dict[str, dict[str, Any]]:
    return {root["path"]: root for root in live.json("status")["roots"]}


def test_a_root_protected_later_gets_a_snapshot_at_once(protected: Live, root: Path, short_tmp: Path) -> None:
    """A root protected later gets a snapshot at once, though the schedule's next is an hour away.

    A snapshot of the other root does not change its age.
    """
    other = short_tmp / "other"
    other.mkdir()
    (other / "file").write_text("at risk")
    protected.run("protect", str(other))
    (first,) = until(
        "the first snapshot of the new root",
        lambda: protected.json("list", "--root", str(other))["snapshots"],
    )
    assert [named["path"] for named in first["roots"]] == [str(other)]
    (root / "file").write_text("good")
    protected.snapshot()
    source = protected.list()[0].id
    before = _roots(protected)
    assert {path: state["last_snapshot"]["id"] for path, state in before.items()} == {
        str(root): source,
        str(other): source,
    }
    assert all(state["next_snapshot"] for state in before.values())
    taken = protected.json("restore", "-s", source, "-p", str(root / "file"), "--overwrite")[
        "safety_snapshot"
    ]
    document = protected.json("status")
    after = {state["path"]: state for state in document["roots"]}
    assert after[str(root)]["last_snapshot"]["id"] == taken
    assert after[str(other)]["last_snapshot"]["id"] == source
    assert after[str(other)]["seconds_since_last"] > after[str(root)]["seconds_since_last"]
    assert document["seconds_since_last"] == after[str(other)]["seconds_since_last"]
    assert document["next_snapshot"] == after[str(other)]["next_snapshot"]
    shown = protected.run("status").stdout.decode()
    assert "AT RISK" in shown
    assert "NEXT" in shown
