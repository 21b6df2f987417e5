"""Consistent copy of a state from devices into an arena while the program continues to compute.

Guarantees: a copy that `AsyncCopy` reports as done and unchanged is the state at the moment in which it
began, whatever the program has queued since. The host does not wait, and a device holds no second copy of the
state.

=====================================================  ==================================================================
tensor                                                 order
=====================================================  ==================================================================
changed only by its optimizer's next step: trained     copied beside forward and backward; that step waits, on the device
parameters and the optimizer's own state
any other (buffers, averages, frozen weights), small   cloned on the device, at most 64 MiB of it, and copied from there
any other, large                                       the program's stream waits for the copy
=====================================================  ==================================================================

That weights change only by optimizer steps is not assumed but checked: by the framework's version counters at
every save, and by digests of their bits, of all tensors in the first saves and of a sample in each later one.
A change found under a copy makes that copy void, and the tensor is waited for from then on.

Copies run on streams of our own. Work that is queued on a stream is done in its order, at some time. A `DeviceStream` stands for one device:
our stream there, and the stream on which the program queues its work now. Its user decides which of the two
waits for the other; only `StreamEvent.wait` lets the host wait. A device without streams (Apple's) has none
of these, and its tensors are copied at once.

A device writes by itself to page-locked memory only: a copy to other memory does not run beside the program, because
the driver lets the host wait for it. An arena is locked once; where that is refused, copies pass through a small
buffer that is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from ciuic.training.arena import Arena
from ciuic.training.format.tensors import ArrayBuffer, copyable
from ciuic.training.logs import log

_BOUNCE_BYTES: Final = 32 << 20
# cudaHostRegisterPortable: page-locked for all devices.
_PORTABLE: Final = 1


# Piece of a tensor that is not contiguous: its elements are put in order on the device first, which takes
# memory there.
_AT_ONCE_BYTES: Final = 64 << 20


class StreamEvent(Protocol):
    """A position in the order of a stream."""

    def done(self) -> bool:
        """Return whether all work before it is done.

        Raises:
            RuntimeError: The device has failed.
        """

    def wait(self) -> None:
        """Let the host wait for all work before it.

        Raises:
            RuntimeError: The device has failed.
        """


class DeviceStream(Protocol):
    """A device. All methods raise RuntimeError where the device has failed or has no memory left."""

    def prepare(self, arena: Arena) -> None:
        """Do what would delay the first copy into an arena; callable from any thread."""

    def follow(self) -> None:
        """Let our stream wait for everything that the program has queued by now."""

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        """Queue on our stream a copy of ``value`` to ``target``, which is in the memory of ``arena``."""

    def mark(self) -> StreamEvent:
        """Return the current end of our stream."""

    def hold(self, mark: StreamEvent) -> None:
        """Let whatever the program queues from here on wait for ``mark``. The host does not wait."""

    def clone(self, value: Any) -> Any:
        """Return a copy on the device, queued on the program's stream."""

    def digest(self, values: Sequence[Any]) -> Any:
        """Return one number per tensor that changes when its bits do, queued on the program's stream.

        Another content may have the same number, but is unlikely to.
        """

    def unequal(self, one: Any, other: Any) -> Any:
        """Compare two results of `digest`, queued on the program's stream.

        `which` can read the result after the next `mark`.
        """

    def which(self, compared: Any) -> list[int]:
        """Return the positions at which the digests differed."""

    def capturing(self) -> bool:
        """Return whether the program records a CUDA graph: then nothing may be queried or waited for."""

    def bits(self, value: Any) -> Hashable:
        """Return the identity of the memory behind a tensor; equal for all tensors on the same memory."""

    def version(self, value: Any) -> int:
        """Return the framework's count of changes in place."""


_STREAMS: dict[object, TorchDeviceStream | None] = {}
"""Streams by device; None for a device without streams."""


def device_stream_of(value: Any) -> DeviceStream | None:
    """Return the stream of the device that holds a tensor.

    There is none on the host, and on a device without streams.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.is_cpu or value.is_meta:
        return None
    device = value.device
    if device not in _STREAMS:
        _STREAMS[device] = _new_stream(torch, device)
    return _STREAMS[device]


def capturing() -> bool:
    """Return whether the program records a CUDA graph now: then nothing on a device may be read."""
    torch = sys.modules.get("torch")
    return (
        torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
    )


def _new_stream(torch: Any, device: Any) -> TorchDeviceStream | None:
    module = getattr(torch, device.type, None)
    # By what the module offers and not by its name: any device with streams like torch.cuda's will do.
    # Apple's has none.
    if not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return None
    return TorchDeviceStream(torch, module, device)


class TorchDeviceStream:
    """Stream of any device type whose torch module has streams and events as torch.cuda has them."""

    def __init__(self, torch: Any, module: Any, device: Any) -> None:
        """Create our stream on a device."""
        self._torch = torch
        self._module = module
        self._device = device
        self._stream = module.Stream(device=device)
        self._bounce = _Bounce(torch)

    def prepare(self, arena: Arena) -> None:
        """Page-lock the arena."""
        pinned_by(arena, self._device)

    def follow(self) -> None:
        """Let our stream wait for the program's."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        """Queue a copy; one into memory that is not page-locked is done on return."""
        target, value = copyable(target, value.detach())
        with self._module.stream(self._stream):
            if not pinned_by(arena, self._device):
                self._bounce.copy(target, value, self.mark)
                return
            if value.is_contiguous():
                target.copy_(value, non_blocking=True)
                return
            # In rows, because a copy of other strides needs a contiguous one on the device first.
            rows = max(1, int(value.shape[0] * _AT_ONCE_BYTES // max(1, target.nbytes))) if value.dim() else 1
            for at in range(0, value.shape[0] if value.dim() else 1, rows):
                part = slice(at, at + rows) if value.dim() else ...
                target[part].copy_(value[part], non_blocking=True)

    def mark(self) -> _TorchStreamEvent:
        """Return an event at the end of our stream."""
        # Without `blocking` the host spins while it waits for a CUDA event.
        event = self._module.Event(blocking=True) if self._device.type == "cuda" else self._module.Event()
        event.record(self._stream)
        return _TorchStreamEvent(event)

    def hold(self, mark: StreamEvent) -> None:
        """Let the program's stream wait for an event."""
        assert isinstance(mark, _TorchStreamEvent)
        self._module.current_stream(self._device).wait_event(mark.event)

    def clone(self, value: Any) -> Any:
        """Return a copy on the device, without gradients, on the current stream."""
        return value.detach().clone()

    def digest(self, values: Sequence[Any]) -> Any:
        """Return the sum of the bits of each tensor, taken as integers."""
        torch = self._torch
        with torch.no_grad():
            return torch.stack(
                [_as_integers(torch, value.detach()).sum(dtype=torch.int64) for value in values]
            )

    def unequal(self, one: Any, other: Any) -> Any:
        """Compare digests on the device, and queue the copy of the result to the host."""
        torch = self._torch
        # Computed on the program's stream, and copied to the host on ours.
        differs = one != other
        self.follow()
        # Without page-locked memory the copy still is right, but the host waits for it.
        try:
            on_host = torch.empty(differs.shape, dtype=torch.bool, device="cpu", pin_memory=True)
        except RuntimeError:
            on_host = torch.empty(differs.shape, dtype=torch.bool, device="cpu")
        with self._module.stream(self._stream):
            on_host.copy_(differs, non_blocking=True)
        return on_host, differs  # `differs` must not be freed before the copy has read it.

    def which(self, compared: Any) -> list[int]:
        """Return the positions at which the digests differed."""
        on_host, _ = compared
        return [int(at) for at in on_host.nonzero().flatten().tolist()]

    def capturing(self) -> bool:
        """Return whether the program records a graph on this kind of device now."""
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def bits(self, value: Any) -> Hashable:
        """Return device and address of the storage."""
        # A DTensor is saved as its local tensor.
        value = getattr(value, "_local_tensor", value)
        return value.device, value.untyped_storage().data_ptr()

    def version(self, value: Any) -> int:
        """Return torch's version counter; 0 for tensors of inference mode, which have none."""
        return 0 if value.is_inference() else int(value._version)


class _TorchStreamEvent:
    """Event of torch on our stream."""

    def __init__(self, event: Any) -> None:
        """Wrap an event that was recorded already."""
        self.event = event

    def done(self) -> bool:
        """Return whether all work before the event is done."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Let the host wait for the event."""
        self.event.synchronize()


def _as_integers(torch: Any, value: Any) -> Any:
    """Return the bits of a tensor as integers: their sum is the same in any order, unlike that of floats."""
    if value.is_complex():
        value = torch.view_as_real(value)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(kinds[value.element_size()])


class _Bounce:
    """Two small page-locked buffers: the device fills one while the host empties the other."""

    def __init__(self, torch: Any) -> None:
        """Allocate nothing before the first copy."""
        self._torch = torch
        self._buffers: list[Any] | None = None

    def copy(self, target: Any, value: Any, mark: Callable[[], StreamEvent]) -> None:
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
        before: tuple[StreamEvent, Any, Any] | None = None
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


def _empty(full: tuple[StreamEvent, Any, Any] | None) -> None:
    if full is not None:
        filled, here, buffer = full
        filled.wait()
        here.copy_(buffer)


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


# Limit of clones on each device.
_CLONE_BYTES: Final = 64 << 20
# Saves at which all tensors are checked: they show how the program's loop behaves
# (docs/decisions/beside-the-next-step.md).
_FULL_CHECKS: Final = 2
# Tensors that are digested at a save after the first ones: a digest costs two small kernels for each.
_SAMPLE: Final = 32


class DeviceTensor(NamedTuple):
    """A tensor on a device, and its destination."""

    name: str
    place: ArrayBuffer
    value: Any
    size_bytes: int


class Overlap:
    """Knowledge about which tensors of a program may be copied beside its next step."""

    def __init__(
        self,
        device_stream_of: Callable[[Any], DeviceStream | None] = device_stream_of,
        *,
        before_step: Callable[[], None] = lambda: None,
        enabled: bool = True,
    ) -> None:
        """Create a registry of watched optimizers.

        Args:
            device_stream_of: Finds the device of a tensor.
            before_step: Called before each step of a watched optimizer, whose weights are about to change.
            enabled: False: the device waits for every copy.
        """
        self.device_stream_of = device_stream_of
        self._enabled = enabled
        self._before_step_hook = before_step
        self.changed_under_copy: set[str] = set()
        """Names of tensors that are waited for from now on."""
        self._optimizers: dict[int, Any] = {}
        self._stepped: set[int] = set()
        self._full_checks = _FULL_CHECKS
        self._next = 0

    def watch(self, optimizer: Any) -> None:
        """Watch an optimizer by its own hook (torch 2.0 and later).

        Without one its tensors are waited for.
        """
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is not None and id(optimizer) not in self._optimizers:
            # Kept, so that no other optimizer can get its id.
            self._optimizers[id(optimizer)] = optimizer
            register(self._before_step)

    def boundary(self) -> None:
        """Record that a step is over."""
        # An optimizer counts only if its hook ran in this step: one whose steps are replayed as a CUDA graph
        # will not report the next step either.
        self._stepped.clear()

    def trained(self) -> set[Hashable]:
        """Return the memory of tensors that change only in optimizer steps that are reported beforehand."""
        found: set[Hashable] = set()
        # Only an optimizer that has reported the last step is trusted to report the next one. Tensors are
        # found by address, because a state_dict has other tensor objects than the parameters.
        for number, optimizer in self._optimizers.items():
            if self._enabled and number in self._stepped:
                for value in _optimizer_tensors(optimizer):
                    stream = self.device_stream_of(value)
                    if stream is not None:
                        found.add(stream.bits(value))
        return found

    def checked(self, count: int) -> list[int]:
        """Return the tensors to digest at this save: all at the first saves, then a rotating sample."""
        if self._full_checks > 0 or count <= _SAMPLE:
            self._full_checks -= 1
            return list(range(count))
        first, self._next = self._next, (self._next + _SAMPLE) % count
        return sorted((first + at) % count for at in range(_SAMPLE))

    def distrust(self, names: Sequence[str]) -> None:
        """Wait for these tensors from now on, and check all others again: more than steps changes tensors."""
        self.changed_under_copy |= set(names)
        self._full_checks = _FULL_CHECKS

    def _before_step(self, optimizer: Any, *_: object) -> None:
        # A step that is recorded as a CUDA graph is replayed later without any hook.
        if not capturing():
            self._stepped.add(id(optimizer))
        self._before_step_hook()


class AsyncCopy:
    """Copy of one state. Its methods raise RuntimeError if the device fails."""

    def __init__(
        self, arena: Arena, items: Sequence[DeviceTensor], overlap: Overlap, *, beside: bool
    ) -> None:
        """Queue the copies.

        Args:
            arena: Destination.
            items: Tensors on devices.
            overlap: Watched optimizers.
            beside: Whether the program may continue meanwhile, as far as that is safe; otherwise what it
                queues waits for all copies.
        """
        self._copies: list[_DeviceCopy] = []
        self._settled = False
        self._failure = ""
        # Parameters with gradients and their optimizer's state. `requires_grad=False` would not mean
        # unchanged: MoCo's key encoder changes in the forward pass.
        trained = overlap.trained() if beside else set()
        by_device: dict[int, tuple[DeviceStream, list[DeviceTensor]]] = {}
        for item in items:
            stream = overlap.device_stream_of(item.value)
            assert stream is not None
            by_device.setdefault(id(stream), (stream, []))[1].append(item)
        try:
            for stream, on_device in by_device.values():
                self._copies.append(_DeviceCopy(stream))
                self._copies[-1].begin(arena, on_device, overlap, trained, beside=beside)
        except BaseException:
            # Copies that are queued already must end before the arena is used again.
            for one in self._copies:
                with suppress(RuntimeError):
                    one.stream.mark().wait()
            raise
        # Nothing has to be watched until the next step, so that nothing has to be compared.
        if not any(one.trained for one in self._copies):
            self.settle()

    def settle(self) -> None:
        """Let whatever the program queues from here on wait for the copy.

        Never raises: what cannot be made sure makes the copy void.
        """
        if self._settled:
            return
        self._settled = True
        for one in self._copies:
            try:
                one.settle()
            except RuntimeError as error:
                self._failure = self._failure or str(error)

    def done(self) -> bool:
        """Return whether all copies and checks have ended.

        Must not be called while a CUDA graph is recorded.
        """
        if not all(mark.done() for mark in self._marks()):
            return False
        # Everything was read, so nothing waits for it any more; `settle` queues the check whether it was
        # changed meanwhile.
        self.settle()
        return all(mark.done() for mark in self._marks())

    def wait(self) -> None:
        """Settle the copy, and let the host wait for it."""
        self.settle()
        for mark in self._marks():
            mark.wait()

    def changed(self) -> list[str]:
        """Return the names of tensors that changed while they were copied; valid when the copy is done."""
        return [name for one in self._copies for name in one.changed()]

    @property
    def void(self) -> str:
        """Why the copy is void, or an empty string; valid when the copy is done."""
        if self._failure:
            return f"its copy from the device is not certain: {self._failure}"
        if changed := self.changed():
            return (
                f"{changed[0]} was changed between two steps while it was copied; "
                "from now on the device waits for the copies of such tensors"
            )
        return ""

    def _marks(self) -> Iterator[StreamEvent]:
        for one in self._copies:
            yield from one.marks


class _DeviceCopy:
    """The part of a state that is on one device."""

    def __init__(self, stream: DeviceStream) -> None:
        self.stream = stream
        self.marks: list[StreamEvent] = []
        self.trained: list[DeviceTensor] = []
        self._references: list[Any] = []
        """References that keep the allocator from reusing memory before it was read."""
        self._copied: StreamEvent | None = None
        self._versions: list[int] = []
        self._checked: list[int] = []
        self._digests_before: Any = None
        self._differences: Any = None
        self._changed: set[str] = set()

    def begin(
        self,
        arena: Arena,
        items: Sequence[DeviceTensor],
        overlap: Overlap,
        trained: set[Hashable],
        *,
        beside: bool,
    ) -> None:
        stream = self.stream
        self._references += [item.value for item in items]
        self.trained = [
            item
            for item in items
            if item.name not in overlap.changed_under_copy and stream.bits(item.value) in trained
        ]
        # WGAN clamps its weights after each step through `.data`, which no version counter sees: a snapshot
        # with half of them clamped would load without an error. Without digests nothing is copied beside the
        # step.
        if not self._watch(overlap):
            self.trained = []
        names = {item.name for item in self.trained}
        others = [item for item in items if item.name not in names]
        clones = self._cloned(others) if beside else []
        names = {item.name for item in clones}
        # After the digests and clones, which are queued on the program's stream.
        stream.follow()
        rest = [item for item in others if item.name not in names]
        # First what the program waits for, so that it waits as short as possible.
        if rest:
            self._copy(arena, rest)
            stream.hold(self.marks[-1])
        if clones or self.trained:
            self._copy(arena, [*clones, *self.trained])
            self._copied = self.marks[-1]

    def _copy(self, arena: Arena, items: Sequence[DeviceTensor]) -> None:
        for item in items:
            self.stream.copy(arena, item.place.target(item.value), item.value)
        self.marks.append(self.stream.mark())

    def _cloned(self, items: Sequence[DeviceTensor]) -> list[DeviceTensor]:
        """Clone the small tensors on the device, smallest first, and return the clones."""
        clones: list[DeviceTensor] = []
        left = _CLONE_BYTES
        # Not all of them: a state that fills the device could not be saved at all.
        for item in sorted(items, key=lambda item: item.size_bytes):
            left -= item.size_bytes
            if left < 0:
                break
            try:
                clones.append(item._replace(value=self.stream.clone(item.value)))
            except RuntimeError:
                break  # The device has no memory left: the program's stream waits for the rest.
        self._references += [item.value for item in clones]
        return clones

    def _watch(self, overlap: Overlap) -> bool:
        """Begin to watch the trained tensors for changes; return whether that is possible."""
        if not self.trained:
            return False
        self._versions = [self.stream.version(item.value) for item in self.trained]
        self._checked = overlap.checked(len(self.trained))
        try:
            self._digests_before = self.stream.digest([self.trained[at].value for at in self._checked])
        except RuntimeError:
            return False  # The device has no memory left.
        return True

    def settle(self) -> None:
        if self._copied is None or not self.trained:
            return
        stream = self.stream
        # Waiting would spoil the graph; so this copy is given up.
        if stream.capturing():
            raise RuntimeError("a CUDA graph was recorded meanwhile")
        for item, version in zip(self.trained, self._versions, strict=True):
            if stream.version(item.value) != version:
                self._changed.add(item.name)
        # The second digest, just before the program's next step, and compared on the device: the host does
        # not wait for it.
        closing = stream.digest([self.trained[at].value for at in self._checked])
        self._differences = stream.unequal(self._digests_before, closing)
        self.marks.append(stream.mark())
        stream.hold(self._copied)

    def changed(self) -> list[str]:
        if self._differences is not None:
            found = self.stream.which(self._differences)
            self._changed |= {self.trained[self._checked[at]].name for at in found}
        return sorted(self._changed)


def _optimizer_tensors(optimizer: Any) -> Iterator[Any]:
    """Yield the tensors that a step changes: parameters with gradients, and the optimizer's state of each."""
    for group in optimizer.param_groups:
        yield from (one for one in group["params"] if getattr(one, "requires_grad", False))
    for of_one in optimizer.state.values():
        yield from of_one.values() if isinstance(of_one, dict) else ()
