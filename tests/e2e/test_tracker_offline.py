"""Weights & Biases offline and TensorBoard: what is logged of saves is read back from their files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.offline_wandb import set_offline
from support.tiny_training import Model

from ciuic import SnapshotManager
from ciuic.training.snapshots import SnapshotTable

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries' own


def save_twice(manager: SnapshotManager) -> SnapshotTable:
    """Save at steps 3 and 5, and close; return the snapshots, oldest first."""
    with manager:
        for step in (3, 5):
            manager.save_snapshot(Model(), step=step, wait=True)
    return manager.list_snapshots()[::-1]


def test_an_offline_run_of_wandb_has_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of an offline run has each snapshot in its summary, and the newest in a line; the program's own keep their steps."""
    wandb = pytest.importorskip("wandb")
    from ciuic.integrations import wandb as tracking

    set_offline(monkeypatch, tmp_path)
    run = wandb.init(project="ours")
    try:
        manager = SnapshotManager(tmp_path / "snapshots")
        tracking.track(manager)
        first, newest = save_twice(manager)
        run.log({"loss": 0.5}, step=5)
    finally:
        run.finish()
        wandb.teardown()
    assert first.facts.trackers == {"wandb": {"run": run.id, "project": "ours"}}
    history, summary = read_run(next(tmp_path.rglob("*.wandb")))
    assert [line["_step"] for line in history if "loss" in line] == [5]
    (line,) = (line for line in history if "ciuic/snapshot" in line)
    assert (line["ciuic/snapshot"], line["ciuic/step"]) == (newest.id, 5)
    assert line["ciuic/size_bytes"] == newest.size_bytes
    for one, step in ((first, 3), (newest, 5)):
        found = summary[f"ciuic/snapshots/{one.id}"]
        assert (found["step"], found["verdict"], found["size_bytes"]) == (step, "GOOD", one.size_bytes)


def read_run(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines and the summary in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    def items(of: Any) -> dict[str, Any]:
        return {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in of}

    lines, summary = [], {}
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            lines.append(items(record.history.item))
        elif record.HasField("summary"):
            summary |= items(record.summary.update)
    return lines, summary


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file: LevelDB's log format (blocks of 32 KiB) behind a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        # The rest of a block that has no room for a header is padding.
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_an_event_file_of_tensorboard_has_each_save(tmp_path: Path) -> None:
    """TensorBoard reads scalars and text of each save at its step, and the log directory resumes the run."""
    pytest.importorskip("tensorboard")
    torch = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from ciuic.integrations import tensorboard as tracking

    writer = torch.SummaryWriter(str(tmp_path / "log"))
    manager = SnapshotManager(tmp_path / "snapshots")
    tracking.track(manager, writer)
    listed = save_twice(manager)
    writer.close()
    read = EventAccumulator(str(tmp_path / "log"))
    read.Reload()
    sizes = [(one.step, one.value) for one in read.Scalars("ciuic/size_bytes")]
    assert sizes == [(one.facts.step, pytest.approx(one.size_bytes, rel=1e-6)) for one in listed]
    assert [one.value for one in read.Scalars("ciuic/good")] == [1, 1]
    texts = read.Tensors("ciuic/snapshot/text_summary")
    told = [json.loads(one.tensor_proto.string_val[0]) for one in texts]
    assert [(one["id"], one["step"], one["verdict"]) for one in told] == [
        (one.id, one.facts.step, "GOOD") for one in listed
    ]
    assert manager.load_snapshot(tracker_run=os.path.abspath(tmp_path / "log")).id == listed[-1].id
