"""Verdicts on checkpoints whose files are symbolic links, as in a cache of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cli_repository import CliRepository
from support.trainer_directories import WHOLE, link

from ciuic.history import checkpoints, judge_snapshot, timelines
from ciuic.repository import Repository
from ciuic.verdicts.verdict import FileVerdicts

INDEX = b'{"weight_map": {"a": "a.safetensors"}}'


def hub(target: str, blob: bytes = WHOLE) -> dict[bytes, Any]:
    return {
        b"snapshots": {b"1": {b"m.safetensors.index.json": INDEX, b"a.safetensors": link(target)}},
        b"blobs": {b"x": blob},
        b"by": link("blobs"),
        b"round": link("round"),
    }


@pytest.mark.parametrize(
    ("target", "state", "reason"),
    [
        ("../../blobs/x", "GOOD", "1 file"),
        ("../../by/x", "GOOD", "1 file"),
        ("ROOT/by/../by/x", "GOOD", "1 file"),
        ("../../blobs/absent", "TORN", "a.safetensors is missing"),
        ("../../../../../../x", "UNKNOWN", "a.safetensors is a link that leads out"),
        ("../../round", "UNKNOWN", "a.safetensors is a link that leads out"),
    ],
)
def test_a_link_is_followed_within_the_root(tmp_path: Path, target: str, state: str, reason: str) -> None:
    """A part that is a link counts where it leads in the root; one that leads out or in a circle proves nothing."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot(hub(target.replace("ROOT", str(made.root))), mode="tracked")
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        (timeline,) = timelines(snapshots)
        (found,) = checkpoints(repository, timeline, snapshots[0])
    assert found.checkpoint.verdict.state == state
    assert found.checkpoint.verdict.reason.startswith(reason)


def test_a_stored_verdict_is_not_taken_where_the_linked_file_is_another(tmp_path: Path) -> None:
    """A directory of links that is the same in two snapshots is judged again: what they lead to may differ."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot(hub("../../blobs/x"), mode="tracked")
    made.snapshot(hub("../../blobs/x", WHOLE[:-1]), mode="tracked")
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        before = judge_snapshot(repository, snapshots, snapshots[1], FileVerdicts())
        now = judge_snapshot(
            repository, snapshots, snapshots[0], FileVerdicts(), {before.snapshot: before}.get
        )
    states = [
        one.checkpoint.verdict.state for record in (before, now) for _, some in record.roots for one in some
    ]
    assert states == ["GOOD", "TORN"]
