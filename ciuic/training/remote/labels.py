"""Labels of training snapshots on a remote: what people find them by."""

from __future__ import annotations

import os

from ciuic.errors import CiuicError
from ciuic.remote.upload.uploader import Labels
from ciuic.repository import Repository
from ciuic.training.format.reading import read_facts
from ciuic.types import Snapshot


def labels_of(repository: Repository, snapshot: Snapshot) -> Labels:
    """Return name, epoch and step of a training state; no labels for a snapshot of files."""
    if not snapshot.is_state or not snapshot.roots:
        return Labels()
    job = os.fsdecode(snapshot.roots[0].path).strip("/")
    try:
        facts = read_facts(repository, snapshot.id)
    # The upload itself finds out what cannot be read.
    except (CiuicError, ValueError):
        return Labels(job)
    return Labels(job, _count(facts.epoch), _count(facts.step))


def _count(value: int | None) -> int | None:
    # Some trainings count from -1, which the name of a manifest does not have.
    return value if value is not None and value >= 0 else None
