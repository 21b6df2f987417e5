"""Labels by which people find a training snapshot on a remote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.cli_repository import CliRepository

from ciuic import SnapshotManager
from ciuic.remote.object_names import manifest_name
from ciuic.remote.uploader import Labels
from ciuic.repository import Repository
from ciuic.training.remote.uploads import labels_of
from ciuic.types import SnapshotId


@pytest.mark.parametrize(
    ("epoch", "step", "labels"), [(3, 70, (3, 70)), (None, 1, (None, 1)), (-1, 5, (None, 5))]
)
def test_a_state_has_name_epoch_and_step(
    epoch: int | None, step: int | None, labels: tuple[int | None, int | None], tmp_path: Path
) -> None:
    """A training state is labelled as it was saved; a number that no manifest's name has is left out."""
    with SnapshotManager(tmp_path / "states") as manager:
        save = manager.save_snapshot(weights={"w": np.ones(10)}, epoch=epoch, step=step, wait=True)
        assert save is not None
        assert save.id is not None, save.error
    with Repository.open(tmp_path / "states") as repository:
        found = labels_of(repository, repository.snapshots.load(SnapshotId.parse(save.id)))
    assert (found.epoch, found.step) == labels
    assert found.job
    manifest_name(job=found.job, epoch=found.epoch, step=found.step, host="host")


def test_snapshots_of_files_have_no_labels(tmp_path: Path) -> None:
    """A snapshot of files has no labels, whatever its tags say."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    id_ = made.snapshot({b"snapshot.json": b"{}"}, tags=("epoch-3",))
    with Repository.open(made.path) as repository:
        assert labels_of(repository, repository.snapshots.load(id_)) == Labels()
