"""Device streams with torch's own tensors: every dtype and layout is copied unchanged, by every way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.late_modules import torch

from ciuic.training import device_copy
from ciuic.training.arena import Arena
from ciuic.training.device_copy import AsyncCopy, DeviceTensor, Overlap, TorchDeviceStream, device_stream_of
from ciuic.training.format.tensors import ArrayBuffer, describe


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
"""Stand-in for torch.cuda with a device that completes everything at once."""


@pytest.fixture
def lane() -> TorchDeviceStream:
    return TorchDeviceStream(torch, _MODULE, torch.device("cpu"))


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


def _copied(lane: TorchDeviceStream, tensors: dict[str, Any], arena: Arena) -> dict[str, Any]:
    items, at = [], 0
    for name, value in tensors.items():
        size_bytes = value.numel() * value.element_size()
        items.append(
            DeviceTensor(
                name, ArrayBuffer(arena.memory[at : at + size_bytes], describe(value)), value, size_bytes
            )
        )
        at += -(-size_bytes // 64) * 64
    copying = AsyncCopy(arena, items, Overlap(lambda value: lane), beside=True)
    assert copying.done()
    return {item.name: item.place.target(item.value) for item in items}


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
@pytest.mark.parametrize("bounce_bytes", [0, 40])
def test_all_kinds_come_over(
    lane: TorchDeviceStream,
    pinned: bool,
    bounce_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Tensors are equal after a copy into page-locked memory, through small buffers, and without either."""
    if bounce_bytes:
        monkeypatch.setattr(device_copy, "_BOUNCE_BYTES", bounce_bytes)
        lane._bounce._buffers = [torch.empty(bounce_bytes, dtype=torch.uint8) for _ in "ab"]
    monkeypatch.setattr("ciuic.training.device_copy._AT_ONCE_BYTES", 100)
    arena = Arena(1 << 20)
    arena.pinned = pinned
    request.addfinalizer(arena.close)
    tensors = _tensors()
    for name, found in _copied(lane, tensors, arena).items():
        assert (
            found.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(tensors[name].contiguous().view(-1).view(torch.uint8))
        ), name


def test_digests_cover_every_dtype(lane: TorchDeviceStream) -> None:
    """A digest changes with one bit, and equal tensors have equal digests."""
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


def test_trained_parameters_are_recognised_by_their_memory(lane: TorchDeviceStream) -> None:
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


def test_changes_in_place_are_counted_through_a_state_dict(lane: TorchDeviceStream) -> None:
    model = torch.nn.Linear(2, 2)
    held = model.state_dict()["weight"]
    before = lane.version(held)
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)
    assert lane.version(held) != before


def test_the_host_has_no_lane() -> None:
    assert device_stream_of(torch.zeros(2)) is None
    assert device_stream_of(torch.zeros(2, device="meta")) is None
    assert device_stream_of(3) is None


class _Runtime:
    """Stand-in for the page-locking functions of the CUDA runtime."""

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
    """The whole arena is locked once and released; a refusal is logged and not tried again."""
    runtime = _Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    arena, device = Arena(3 << 20), torch.device("cuda:1")
    assert [device_copy.pinned_by(arena, device) for _ in "ab"] == [code == 0] * 2
    assert list(runtime.locked.values()) == ([arena.size_bytes] if code == 0 else [])
    arena.close()
    assert runtime.locked == {}
    assert not device_copy.pinned_by(arena, device)
