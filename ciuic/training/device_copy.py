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
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ciuic.training.arena import Arena
from ciuic.training.device_streams import DeviceStream, StreamEvent, capturing, device_stream_of
from ciuic.training.format.tensors import ArrayBuffer

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
