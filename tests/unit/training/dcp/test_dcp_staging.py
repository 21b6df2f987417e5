"""Staging of `dcp.async_save`: one copy, which the writer process reads where it stands."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule, torch

from ciuic.config import RemoteConfig
from ciuic.repository import Repository
from ciuic.training.arena import Arena
from ciuic.training.remote.copies import RemoteCandidate

dcp: Any = LateModule("torch.distributed.checkpoint")
rank_files: Any = LateModule("ciuic.training.dcp.rank_files")
storage: Any = LateModule("ciuic.training.dcp.storage")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("torch_distributed")]


def _state() -> dict[str, object]:
    big = torch.arange(100_000, dtype=torch.float32)
    return {
        "big": big,
        "tied": big,
        "small": torch.tensor([1, 2], dtype=torch.int8),
        "odd": torch.arange(3, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(80_000.0).view(200, 400).t(),
        "ordered": OrderedDict(x=[torch.ones(2), (3, None)]),
        "bf16": torch.full((70_001,), 1.5, dtype=torch.bfloat16),
    }


def test_the_copy_is_equal_and_independent(tmp_path: Path) -> None:
    """A copy keeps tied tensors tied, copies other values too, and fits the room that was calculated."""
    state = _state()
    memory = memoryview(bytearray(rank_files.arena_bytes(state)))
    placed = rank_files.ArenaPlacer(memory)
    copy = rank_files.copy_state(state, placed)
    assert placed.end == len(memory)
    assert copy["tied"] is copy["big"]
    assert type(copy["ordered"]) is OrderedDict
    for name in ("big", "small", "odd", "empty", "strided", "bf16"):
        assert copy[name].dtype == state[name].dtype
        assert torch.equal(copy[name], state[name])
    state["big"].zero_()
    state["ordered"]["x"][0].zero_()
    assert copy["big"].sum() > 0
    assert copy["ordered"]["x"][0].sum() == 2
    assert sorted(size for _, size in placed.starts.values()) == [140_002, 320_000, 400_000]
    assert all(
        offset % rank_files.HEADER_BYTES == 0 and offset >= rank_files.HEADER_BYTES
        for offset, _ in placed.starts.values()
    )


def test_large_staged_tensors_are_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are not copied again, and the loaded state is that of the time of staging."""
    from ciuic.training.dcp import rank_files

    copies = []
    place = rank_files.tensors.ArrayBuffer

    class Counted(place):
        def fill(self, value: object) -> None:
            copies.append(value.nbytes)
            super().fill(value)

    monkeypatch.setattr(rank_files.tensors, "ArrayBuffer", Counted)
    writer = storage.CiuicStorageWriter(tmp_path / "snapshots")
    for number in range(4):  # as often as the arenas are used again
        copies.clear()
        state = {"big": torch.full((100_000,), float(number)), "small": torch.tensor([number])}
        upload = dcp.async_save(state, checkpoint_id=f"n{number}", storage_writer=writer, no_dist=True)
        state["big"].zero_()
        upload.result()
        assert copies == [8]
    writer.close()
    for number in range(4):
        loaded = {"big": torch.zeros(100_000), "small": torch.tensor([-1])}
        reader = storage.CiuicStorageReader(tmp_path / "snapshots", f"n{number}")
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert loaded["big"].eq(number).all()
        assert loaded["small"] == number


def test_a_state_of_an_empty_tensor_alone_is_saved(tmp_path: Path) -> None:
    """A tensor without elements is saved and loaded where it is the only one: a rank's empty shard."""
    writer = storage.CiuicStorageWriter(tmp_path / "snapshots")
    dcp.save({"empty": torch.empty(0, 4)}, checkpoint_id="n", storage_writer=writer, no_dist=True)
    writer.close()
    loaded = {"empty": torch.empty(0, 4)}
    reader = storage.CiuicStorageReader(tmp_path / "snapshots", "n")
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded["empty"].shape == (0, 4)


def test_a_clock_that_is_behind_makes_no_earlier_checkpoint_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save after loading a remote checkpoint is dated later than it, even if the clock is a day behind."""
    from ciuic.training.dcp.reading import _SnapshotSource

    there = RemoteCandidate("r", 0, time.time_ns(), "cs-1")
    source = _SnapshotSource(tmp_path, b"/dcp", (RemoteConfig(name="r", url="file:///unused"),))
    monkeypatch.setattr(source, "_look_again", lambda: None)
    monkeypatch.setattr(source, "_here", list)
    monkeypatch.setattr(source, "_elsewhere", lambda _: [there])
    monkeypatch.setitem(rank_files.loaded_ns, b"/dcp", 0)
    assert source.newest_whole([]) is there
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 24 * 3600 * 10**9)
    writer = storage.CiuicStorageWriter(tmp_path / "here")
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    writer.close()
    with Repository.open(tmp_path / "here") as repository:
        assert repository.snapshots.list()[0].time_ns > there.time_ns


def test_a_device_copy_is_complete_when_staging_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from a device follows what the program has queued, and is complete when staging returns."""
    calls: list[str] = []

    class Recording:
        def follow(self) -> None:
            calls.append("follow")

        def copy(self, arena: object, target: torch.Tensor, value: torch.Tensor) -> None:
            calls.append("copy")
            target.copy_(value)

        def mark(self) -> Recording:
            return self

        def wait(self) -> None:
            calls.append("wait")

    lane = Recording()
    monkeypatch.setattr("ciuic.training.dcp.rank_files.device_stream_of", lambda tensor: lane)
    state = {"a": torch.arange(5.0), "b": torch.arange(3)}
    arena = Arena(1 << 20)
    placed = rank_files.ArenaPlacer(memoryview(arena.map), arena)
    found = rank_files.copy_state(state, placed)
    placed.wait()
    arena.close()
    assert calls == ["follow", "copy", "copy", "wait"]
    assert all(found[name].equal(value) for name, value in state.items())
