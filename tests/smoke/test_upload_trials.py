"""`ciuic remote upload` over a real server: killed, behind a network that fails, beside collections, and its host lost.

`make torture ARGS=remote` does the same for longer, and on more servers.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import upload_trials
from support.live import Commands
from support.object_servers import SeaweedFS, seaweedfs
from support.shared_remote import SharedRemote

__all__ = ["seaweedfs"]


def test_nothing_is_lost_or_committed_twice_behind_faults(seaweedfs: SeaweedFS, short_tmp: Path) -> None:
    """With lost replies, cut bodies, delays and 503 for a time, each snapshot is committed once and comes back exactly."""
    found = upload_trials.behind_faults(
        seaweedfs, short_tmp, random.Random(1), snapshots=3, unavailable_seconds=3
    )
    assert found.flaws == ()
    assert found.counted > 10


@pytest.mark.full
def test_a_lost_host_comes_back_from_a_remote_in_clear(seaweedfs: SeaweedFS, short_tmp: Path) -> None:
    """Every snapshot of an uploader that was killed again and again is restored exactly, when its host is gone."""
    found = upload_trials.killed_and_lost(seaweedfs, short_tmp, random.Random(2), sealed=False, snapshots=1)
    assert found.flaws == ()
    assert found.counted >= 2


@pytest.mark.full
def test_hosts_and_collections_that_are_killed_lose_and_leak_nothing(
    seaweedfs: SeaweedFS, short_tmp: Path
) -> None:
    """Every snapshot that is listed is restored exactly after kills of all that use a remote, and nothing else stays."""
    with Commands.warm():
        shared = SharedRemote(seaweedfs, short_tmp, random.Random(3))
        try:
            shared.round()
        finally:
            shared.close()
    assert shared.flaws == []
    assert shared.kills.total() >= 5
    assert shared.restored >= 5
