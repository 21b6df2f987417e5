"""Verdicts that a host publishes on its roots."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from support.checkpoint_files import FORMATS
from support.restoring import take

from ciuic.history import judge_snapshot
from ciuic.remote.replication import _root_status
from ciuic.repository import Repository
from ciuic.verdicts.records import KEY_VARIABLE, VerdictRecords, own_key
from ciuic.verdicts.verdict import FileVerdicts

WHOLE = FORMATS["safetensors"].make(random.Random(1))


def test_each_root_has_the_verdict_of_its_own_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host publishes each root of a snapshot with the verdict of that root's checkpoint."""
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key"))
    roots = [tmp_path / name for name in ("torn", "whole", "none")]
    for at, (root, content) in enumerate(zip(roots, (WHOLE[:-5], WHOLE, b""), strict=True)):
        root.mkdir()
        name = "step.safetensors" if content else "log"
        (root / name).write_bytes(content)
        seconds = time.time() - 100 + at
        os.utime(root / name, (seconds, seconds))
    with Repository.create(tmp_path / "repository") as repository:
        snapshot = take(repository, *roots)
        record = judge_snapshot(repository, [snapshot], snapshot, FileVerdicts())
        assert record is not None
        assert VerdictRecords(repository, own_key()).write(record)
        (info,) = repository.snapshots.list()
        verdicts = VerdictRecords(repository)
        found = [_root_status(repository, os.fsencode(root), info, verdicts).verdict for root in roots]
    # Not GOOD: of a directory without an overlay nobody knows whether it was written to meanwhile.
    assert found == ["TORN", "UNKNOWN", ""]
