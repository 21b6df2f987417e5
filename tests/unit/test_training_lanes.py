"""Lanes with torch's own tensors: every dtype and layout comes over as it is, whichever way it has to take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.training import pinning
from ciuic.training.arena import Arena
from ciuic.training.lanes import TorchLane, lane_of
from ciuic.training.overlap import Copying, Item, Overlap
from ciuic.training.tensors import Place, describe

torch = pytest.importorskip("torch", reason="torch is not installed")


class _Event:
    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


@contextlib.contextmanager
def _stream(stream: object) -> Iterator[None]:
    yield


_MODULE = SimpleNamespace(
    Event=_Event, Stream=_Stream, stream=_stream, current_stream=lambda device: _Stream()
)
"""As torch.cuda, of a device that does everything at once."""


@pytest.fixture
def lane() -> TorchLane:
    return TorchLane(torch, _MODULE, torch.device("cpu"))


def _tensors() -> dict[str, Any]:
    made = torch.randn(4, 6, 8)
    kinds = ["float64", "bfloat16", "int16", "uint8", "bool", "complex64", "complex128", "float8_e4m3fn"]
    return {
        **{kind: made.abs().to(getattr(torch, kind)) for kind in kinds},
        "transposed": made.transpose(0, 2),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "a part": made[:, 1:3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "one number": torch.tensor(3.5),
    }


def _copied(lane: TorchLane, tensors: dict[str, Any], arena: Arena) -> dict[str, Any]:
    items, at = [], 0
    for name, value in tensors.items():
        size_bytes = value.numel() * value.element_size()
        items.append(
            Item(name, Place(arena.memory[at : at + size_bytes], describe(value)), value, size_bytes)
        )
        at += -(-size_bytes // 64) * 64
    copying = Copying(arena, items, Overlap(lambda value: lane), beside=True)
    assert copying.done()
    return {item.name: item.place.target(item.value) for item in items}


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
@pytest.mark.parametrize("bounce_bytes", [0, 40])
def test_all_kinds_come_over(
    lane: TorchLane, pinned: bool, bounce_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight into memory that is page-locked, through small buffers, or, where there are none, at once."""
    if bounce_bytes:
        monkeypatch.setattr(pinning, "_BOUNCE_BYTES", bounce_bytes)
        lane._bounce._buffers = [torch.empty(bounce_bytes, dtype=torch.uint8) for _ in "ab"]
    monkeypatch.setattr("ciuic.training.lanes._AT_ONCE_BYTES", 100)
    arena = Arena(1 << 20)
    arena.pinned = pinned
    tensors = _tensors()
    for name, found in _copied(lane, tensors, arena).items():
        assert (
            found.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(tensors[name].contiguous().view(-1).view(torch.uint8))
        ), name


def test_digests_tell_of_every_dtype(lane: TorchLane) -> None:
    """One bit is enough, and what is the same has the same."""
    for name, value in _tensors().items():
        if name == "expanded":
            continue
        before = lane.digest([value, torch.zeros(3)])
        assert lane.which(lane.unequal(before, lane.digest([value, torch.zeros(3)]))) == []
        flat = value.view(-1) if value.is_contiguous() else value.flatten()[:0]
        if not flat.numel():
            continue
        bits = flat.view(torch.uint8)
        bits[0] ^= 1
        assert lane.which(lane.unequal(before, lane.digest([value, torch.zeros(3)]))) == [0], name


def test_what_an_optimizer_trains_is_known_by_its_memory(lane: TorchLane) -> None:
    """A state_dict has other tensor objects than the optimizer: parameters that it trains and what it keeps; nothing else."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    overlap = Overlap(lambda value: lane if isinstance(value, torch.Tensor) else None)
    overlap.watch(optimizer)
    assert overlap.trained() == set()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    trained = overlap.trained()
    names = {name for name, value in model.state_dict().items() if lane.bits(value) in trained}
    assert names == {"0.weight", "1.weight", "1.bias"}
    moments = optimizer.state_dict()["state"][0]
    assert lane.bits(moments["exp_avg"]) in trained
    overlap.boundary()
    assert overlap.trained() == set()


def test_changes_in_place_are_counted_through_a_state_dict(lane: TorchLane) -> None:
    model = torch.nn.Linear(2, 2)
    held = model.state_dict()["weight"]
    before = lane.version(held)
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)
    assert lane.version(held) != before


def test_the_host_has_no_lane() -> None:
    assert lane_of(torch.zeros(2)) is None
    assert lane_of(torch.zeros(2, device="meta")) is None
    assert lane_of(3) is None


class _Runtime:
    """CUDA's, of which page-locking is used."""

    def __init__(self, code: int) -> None:
        self._code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        if not self._code:
            self.locked[address] = size_bytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_an_arena_is_page_locked_once_and_let_go(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it; where it is refused that is said, and no more is made of it."""
    runtime = _Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    arena, device = Arena(3 << 20), torch.device("cuda:1")
    assert [pinning.pinned_by(arena, device) for _ in "ab"] == [code == 0] * 2
    assert list(runtime.locked.values()) == ([arena.size_bytes] if code == 0 else [])
    arena.close()
    assert runtime.locked == {}
    assert not pinning.pinned_by(arena, device)
