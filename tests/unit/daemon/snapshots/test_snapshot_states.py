"""Tests of the look-up of a snapshot by its id while the daemon starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from support.fake_daemon import Bench, FakeOverlay, until

from ciuic.daemon.base.runtime import CutRecord, PendingRecord
from ciuic.daemon.snapshots.snapshot_states import find_state
from ciuic.errors import NotFound, Unreachable


class _Store:
    """Repository with neither committed nor lost snapshots."""

    def find(self, snapshot_id: str) -> None:
        return None

    def lost(self, snapshot_id: str) -> None:
        return None


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_promised_snapshot_is_no_unknown_one_while_the_daemon_starts(bench: Bench) -> None:
    """A caller that waits for a predecessor's snapshot gets it, and one that does not is to ask again."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    overlay.pending = [1]
    record = PendingRecord(id="cs-1", time_ns=1, cuts=[CutRecord(path="/a", session="s", epoch=1)])
    store: Any = _Store()

    async def main() -> None:
        states = []

        async def wait() -> None:
            states.append(await find_state(bench.snapshots, store, "cs-1", wait=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            for id_ in ("cs-1", "cs-2"):
                with pytest.raises(Unreachable, match="starting"):
                    await find_state(bench.snapshots, store, id_, wait=False)
            await bench.snapshots.resume([record])
            nursery.start_soon(bench.snapshots.capturing.run)
            with trio.fail_after(60):
                await until(lambda: states)
            nursery.cancel_scope.cancel()
        assert [state.id for state in states] == ["cs-1"]
        for wait_for_it in (False, True):
            with pytest.raises(NotFound):
                await find_state(bench.snapshots, store, "cs-2", wait=wait_for_it)

    trio.run(main)
