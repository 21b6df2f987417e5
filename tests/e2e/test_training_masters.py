"""Weights of 16 bits with 32-bit masters come back bit for bit, stored at the size of the masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch

from ciuic import SnapshotManager
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository
from ciuic.repository import pack_format as pf


class WithMasters:
    """Mixed-precision optimizer: AdamW on float32 copies, from which the weights are rounded."""

    def __init__(self, weights: list[Any]) -> None:
        self.weights = weights
        self.masters = [weight.detach().float() for weight in weights]
        self.adam = torch.optim.AdamW(self.masters, lr=1e-3)

    def step(self) -> None:
        for master in self.masters:
            master.grad = torch.randn_like(master)
        self.adam.step()
        self.round()

    def round(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "fp32_from_fp16": [self.masters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for master, loaded in zip(self.masters, state["fp32_from_fp16"][0], strict=True):
            master.copy_(loaded)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_masters_cost_no_more_than_their_lower_halves(tmp_path: Path, name: str) -> None:
    """Masters cost no more than their lower halves in three snapshots, one with a NaN."""
    dtype = getattr(torch, name)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(512, 512, bias=False, dtype=dtype) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    optimizer = WithMasters(list(model.parameters()))
    saved = []
    with SnapshotManager(tmp_path / "snapshots", compression="small") as manager:
        for number in range(3):
            optimizer.step()
            if number == 1:
                optimizer.masters[0][5, :3] = torch.tensor([torch.nan, -torch.inf, 1e-42])
                optimizer.round()
            save = manager.save_snapshot(model, optimizer)
            assert save is not None
            save.wait()
            held = [*model.parameters(), *optimizer.masters]
            saved.append((manager.list_snapshots()[0].id, [value.detach().clone() for value in held]))
    with Repository.open(tmp_path / "snapshots") as repository:
        assert verify_snapshots(repository, checksum=True).damages == []
        assert list(repository.scrub()) == []
        relative = [
            record
            for pack in repository.packs()
            for record in repository.pack_records(pack.number)
            if record.flags & pf.FLAG_DIFFERENCE
            and (tmp_path / "snapshots/packs" / f"{pack.number:016x}.pack").read_bytes()[record.offset + 1]
        ]
        # Masters of 1 MiB and their header have five blocks of 256 KiB, of which the last is nearly empty.
        assert len(relative) >= 3 * 3 * 4
        assert all(record.stored_bytes < 0.54 * record.raw_bytes for record in relative)
    with SnapshotManager(tmp_path / "snapshots") as manager:
        for id_, values in saved:
            state = manager.load_snapshot(id_)
            loaded = [
                *state["model_state_dict"].values(),
                *state["optimizer_state_dict"]["fp32_from_fp16"][0],
            ]
            for value, wanted in zip(loaded, values, strict=True):
                assert torch.equal(value.view(torch.uint8), wanted.view(torch.uint8))
