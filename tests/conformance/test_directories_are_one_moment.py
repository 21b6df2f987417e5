"""Every directory of a snapshot is one moment of its writer's history, all writers' at one instant.

A short run of `make torture ARGS=oracle`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import oracle_run
from support.capture_child import Found
from support.oracle import _STAMP, History, Moments, Oracle, share_an_instant
from support.overlay import PASSES, overlay_over
from support.small_disks import missing, small_disk

from ciuic.repository import Repository

CUTS = 4


@pytest.mark.mount
@pytest.mark.skipif(
    not PASSES, reason="what that driver lets the kernel cache is later written back, in any order"
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.skipif(bool(missing(kind)), reason=missing(kind)))
        for kind in ("ext4", "xfs")
    ],
)
def test_snapshots_under_four_writers(kind: str, short_tmp: Path) -> None:
    """Snapshots under four writers pass the oracle, on file systems with and without shared extents."""
    with small_disk(short_tmp, kind) as disk:
        (disk / "root").mkdir()
        (short_tmp / "logs").mkdir()
        Repository.create(short_tmp / "repository", block_size=4096).close()
        with overlay_over(disk / "root", short_tmp / "w.sock", block_size=4096) as overlay:
            outcome = oracle_run.run(
                overlay,
                short_tmp / "repository",
                short_tmp / "logs",
                seed=random.randrange(1 << 30),
                cuts=CUTS,
            )
    assert outcome.wrong == []
    assert outcome.snapshots == CUTS
    assert outcome.not_held < outcome.files / 4


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of a hundred steps, step n from nanosecond 10 n to 10 n + 5."""
    path = tmp_path / "log"
    path.write_bytes(b"".join(_STAMP.pack(10 * number, 10 * number + 5) for number in range(100)))
    return path


def view(seed: int, count: int) -> dict[str, Found]:
    history = History(seed)
    while history.count < count:
        history.step()
    return {name: Found(bytes(content), True, None) for name, content in history.files.items()}


def test_the_oracle_knows_a_moment_from_a_mixture(log: Path) -> None:
    """The oracle accepts the state after 50 steps, and rejects one unmarked file of 20 steps later."""
    now, later = view(7, 50), view(7, 70)
    assert Oracle(7, log).judge(now, 480, 520).spans
    mixed = next(name for name in now if name in later and now[name] != later[name])
    wrong = now | {mixed: later[mixed]}
    assert not Oracle(7, log).judge(wrong, 480, 520).spans
    assert Oracle(7, log).judge(wrong | {mixed: later[mixed]._replace(lag_ms=5)}, 480, 520).spans
    # A moment, but not the one of this cut.
    assert not Oracle(7, log).judge(later, 480, 520).spans
    assert not Oracle(7, log).judge({**now, "foreign": now[mixed]}, 480, 520).spans


def test_moments_that_no_instant_has_in_common() -> None:
    """The oracle rejects a snapshot in which each writer has a moment, with no instant common to all."""
    early, late = Moments(((0, 10),), ""), Moments(((20, 30),), "")
    assert not share_an_instant([early, late])
    assert share_an_instant([early, late, Moments(((5, 25),), "")][:1])
    assert share_an_instant([Moments(((0, 10), (18, 22)), ""), late])
