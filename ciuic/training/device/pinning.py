"""Page-locked memory, which a device can write by itself.

An arena is locked once; where that is refused, copies pass through a small buffer that is.

A copy to other memory does not run beside the program: the driver lets the host wait for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from ciuic.training.device.arena import Arena
from ciuic.training.util.logs import log

_BOUNCE_BYTES: Final = 32 << 20
# cudaHostRegisterPortable: page-locked for all devices.
_PORTABLE: Final = 1


class _Waits(Protocol):
    def wait(self) -> None: ...


def pinned_by(arena: Arena, device: Any) -> bool:
    """Page-lock an arena on the first call, and return whether this device can write to it by itself."""
    if arena.pinned is None:
        arena.pin(lambda address, size_bytes: _register(address, size_bytes, device))
    return bool(arena.pinned)


def _register(address: int, size_bytes: int, device: Any) -> Callable[[], None] | None:
    """Page-lock memory; return how to undo that, or None if it cannot be done."""
    # torch gives access to such a call for CUDA alone, and calls ROCm cuda too.
    if device.type != "cuda":
        return None
    code = _in_a_thread(device, "cudaHostRegister", address, size_bytes, _PORTABLE)
    if code != 0:
        log.warning(
            "ciuic: %d MiB cannot be page-locked (CUDA error %s): saves stop the training for longer",
            size_bytes >> 20,
            code,
        )
        return None

    def undo() -> None:
        _in_a_thread(device, "cudaHostUnregister", address)

    return undo


def _in_a_thread(device: Any, name: str, *arguments: int) -> int | None:
    """Call a function of the CUDA runtime in a thread of its own.

    Return its code, or None if there is no such function.
    """
    torch: Any = sys.modules["torch"]
    codes: list[int] = []

    def call() -> None:
        # A new thread begins on device 0, where the call would make a context though the program may not use
        # that device at all.
        with suppress(Exception), torch.cuda.device(device):
            codes.append(int(getattr(torch.cuda.cudart(), name)(*arguments)))

    # An error of the CUDA runtime stays with the thread in which it occurred: in the program's thread the
    # next kernel launch would raise it. Once for an arena, so the cost of a thread does not matter.
    thread = threading.Thread(target=call, name="ciuic-pin", daemon=True)
    thread.start()
    thread.join()
    return codes[0] if codes else None


class Bounce:
    """Two small page-locked buffers: the device fills one while the host empties the other."""

    def __init__(self, torch: Any) -> None:
        """Allocate nothing before the first copy."""
        self._torch = torch
        self._buffers: list[Any] | None = None

    def copy(self, target: Any, value: Any, mark: Callable[[], _Waits]) -> None:
        """Copy a tensor on the current stream; the copy is done on return.

        Args:
            target: Destination on the host.
            value: Tensor on the device.
            mark: Returns an event at the end of the current stream.
        """
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
            # Empty the other buffer while the device fills this one.
            _empty(before)
            before = filled, here, buffer
        _empty(before)

    def _made(self) -> list[Any]:
        try:
            return [
                self._torch.empty(_BOUNCE_BYTES, dtype=self._torch.uint8, device="cpu", pin_memory=True)
                for _ in "ab"
            ]
        except RuntimeError:
            return []


def _empty(full: tuple[_Waits, Any, Any] | None) -> None:
    if full is not None:
        filled, here, buffer = full
        filled.wait()
        here.copy_(buffer)
