"""Memory that a device can write by itself: arenas are page-locked once, and where that is refused a small buffer stands between.

A copy to other memory is no copy beside the program: the driver lets the host wait for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from ciuic.training.arena import Arena
from ciuic.training.logs import log

_BOUNCE_BYTES: Final = 32 << 20
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: for all devices."""


class _Waits(Protocol):
    def wait(self) -> None: ...


def pinned_by(arena: Arena, device: Any) -> bool:
    """Whether this kind of device can write to it by itself; makes it so the first time that it is asked."""
    if arena.pinned is None:
        arena.pin(lambda address, size_bytes: _register(address, size_bytes, device))
    return bool(arena.pinned)


def _register(address: int, size_bytes: int, device: Any) -> Callable[[], None] | None:
    """How to undo it; None where it cannot be done.

    In a thread of its own: an error of the CUDA runtime stays with the thread in which it came up, where the next kernel that is launched
    would raise it.
    """
    if device.type != "cuda":
        return None
    code = _in_a_thread(device, "cudaHostRegister", address, size_bytes, _PORTABLE)
    if code != 0:
        log.warning(
            "ciuic: %d MiB cannot be page-locked (CUDA error %s): saves stand the training still for longer",
            size_bytes >> 20,
            code,
        )
        return None

    def undo() -> None:
        _in_a_thread(device, "cudaHostUnregister", address)

    return undo


def _in_a_thread(device: Any, name: str, *arguments: int) -> int | None:
    """What the function of the CUDA runtime returned; None where there is none."""
    torch: Any = sys.modules["torch"]
    codes: list[int] = []

    def call() -> None:
        # A thread begins on device 0, where the program may have nothing at all.
        with suppress(Exception), torch.cuda.device(device):
            codes.append(int(getattr(torch.cuda.cudart(), name)(*arguments)))

    thread = threading.Thread(target=call, name="ciuic-pin", daemon=True)
    thread.start()
    thread.join()
    return codes[0] if codes else None


class Bounce:
    """Two small buffers in pinned memory, of which one is filled by the device while the other is emptied by the host."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._buffers: list[Any] | None = None

    def copy(self, target: Any, value: Any, mark: Callable[[], _Waits]) -> None:
        """On the current stream, of which ``mark`` tells how far it is; done on return."""
        buffers = self._buffers = self._buffers or self._made()
        if not buffers or not value.is_contiguous() or value.element_size() > 8 or not value.numel():
            target.copy_(value)
            return
        torch = self._torch
        into, source = target.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
        before: tuple[_Waits, Any, Any] | None = None
        for number, at in enumerate(range(0, into.numel(), _BOUNCE_BYTES)):
            here = into[at : at + _BOUNCE_BYTES]
            buffer = buffers[number % 2][: here.numel()]
            buffer.copy_(source[at : at + _BOUNCE_BYTES], non_blocking=True)
            filled = mark()
            _empty(before)
            before = filled, here, buffer
        _empty(before)

    def _made(self) -> list[Any]:
        try:
            return [self._torch.empty(_BOUNCE_BYTES, dtype=self._torch.uint8, pin_memory=True) for _ in "ab"]
        except RuntimeError:
            return []


def _empty(full: tuple[_Waits, Any, Any] | None) -> None:
    if full is not None:
        filled, here, buffer = full
        filled.wait()
        here.copy_(buffer)
