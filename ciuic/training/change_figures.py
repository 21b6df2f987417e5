"""Figures of the change of one tensor of any stored dtype, summed over parts of it, without the framework that saved it.

Guarantees: sums are those of float64, scaled where squares would overflow or vanish. Norms and cosine are
those of the elements that are finite on both sides; NaN and infinities are counted apart, because one of them
would make every norm NaN. Elements whose bits are equal have not changed, NaN included. The change of 64-bit
integers is exact.

bfloat16 and the 8-bit floats have no dtype in NumPy and are widened here, without rounding. Of a dtype that
is not known, or holds no numbers, only the bytes can be compared. NumPy is imported when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ciuic.errors import CiuicError, pip_install
from ciuic.training.format.tensors import SAFETENSORS_NAMES

Array = Any
"""A numpy.ndarray: NumPy is imported when a difference is computed, not with this module."""

_NATIVE: Final = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "u1",
}
_COMPLEX: Final = {"complex64": "<c8", "complex128": "<c16"}
# Bits of exponent and fraction; True: the highest exponent is infinity and NaN, False: only all ones is NaN.
_EIGHT_BITS: Final = {"F8_E4M3": (4, 3, False), "F8_E5M2": (5, 2, True)}


class NumberKind(NamedTuple):
    """Conversion of the bytes of one dtype to numbers."""

    name: str
    """Name in safetensors, or the framework's own where safetensors has none."""
    element_bytes: int
    read: Callable[[Array], Array] | None
    """Converts bytes (uint8) to numbers; None: only bytes can be compared.

    The numbers are float64 or complex128 and exact; 64-bit integers stay integers.
    """


def numpy() -> Any:
    """Return NumPy.

    Raises:
        CiuicError: It is not installed.
    """
    try:
        import numpy as np
    except ImportError:
        raise CiuicError(
            "tensors can be compared only with NumPy, which is not installed", hint=pip_install("numpy")
        ) from None
    return np


def number_kind(stored: str, own: str = "", *, of_torch: bool = True) -> NumberKind:
    """Return how a dtype is read.

    Args:
        stored: Name in safetensors.
        own: The framework's own name, where safetensors has none and the elements are stored as bytes.
        of_torch: Whether the framework is torch, else NumPy.
    """
    if own and of_torch:
        stored = SAFETENSORS_NAMES.get(own, stored)
        if own not in SAFETENSORS_NAMES:
            return _native(own, _COMPLEX[own]) if own in _COMPLEX else NumberKind(own, 1, None)
    elif own:
        return _of_numpy(own)
    if stored == "BF16":
        return NumberKind(stored, 2, _bfloat16)
    if stored in _EIGHT_BITS:
        table = _eight_bit_values(*_EIGHT_BITS[stored])
        return NumberKind(stored, 1, lambda raw: table[raw])
    return _native(stored, _NATIVE[stored]) if stored in _NATIVE else NumberKind(stored, 1, None)


def _of_numpy(own: str) -> NumberKind:
    # Stored text: only what is the name of a plain number is used, never what NumPy makes of other text.
    try:
        dtype = numpy().dtype(own)
    except (TypeError, ValueError, SyntaxError):
        return NumberKind(own, 1, None)
    return _native(own, own) if dtype.kind in "biufc" and dtype.shape == () else NumberKind(own, 1, None)


def _native(name: str, dtype_text: str) -> NumberKind:
    np = numpy()
    dtype = np.dtype(dtype_text)
    if dtype.kind in "iu" and dtype.itemsize == 8:
        wide = np.int64 if dtype.kind == "i" else np.uint64
    else:
        wide = np.complex128 if dtype.kind == "c" else np.float64
    return NumberKind(name, dtype.itemsize, lambda raw: raw.view(dtype).astype(wide))


def _bfloat16(raw: Array) -> Array:
    np = numpy()
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _eight_bit_values(exponent_bits: int, fraction_bits: int, has_infinity: bool) -> Array:
    """Return the numbers of the 256 bytes.

    References:
        P. Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433 (2022).
    """
    np = numpy()
    byte = np.arange(256)
    fraction = (byte & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    exponent = (byte >> fraction_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    highest = exponent == (1 << exponent_bits) - 1
    if has_infinity:
        value = np.where(highest, np.where(fraction > 0, np.nan, np.inf), value)
    else:
        value = np.where((byte & 0x7F) == 0x7F, np.nan, value)
    return np.where(byte >= 128, -value, value)


# Numbers below 2**400 have sums of squares that are finite, and above 2**-400 squares that are not zero.
_SAFE_EXPONENT: Final = 400
_ELEMENTS_AT_ONCE: Final = 1 << 18


class ChangeFigures(NamedTuple):
    """Figures of the change of one tensor."""

    elements: int
    """Elements of the tensor."""
    changed_elements: int | None
    """Elements whose bits differ; None if what they are is not known, as of dtypes that are no numbers."""
    change_norm: float | None
    """Euclidean norm of the change."""
    old_norm: float | None
    """Euclidean norm before; None where identical blocks were to be left unread."""
    relative_change: float | None
    """``change_norm`` by ``old_norm``; infinite if only the latter is 0."""
    largest_change: float | None
    """Largest absolute change of an element."""
    cosine: float | None
    """Cosine of the angle between old and new; None if one of them is 0, and as ``old_norm``."""
    old_nan: int
    new_nan: int
    old_inf: int
    new_inf: int
    """Infinities of either sign. All four counts are of the parts that were read."""
    new_norm: float | None = None
    """Euclidean norm after, of all elements that are finite then; None as ``old_norm``."""


class FigureSums:
    """Sums for the figures of one tensor."""

    def __init__(self, old: NumberKind, new: NumberKind) -> None:
        """Begin with nothing."""
        self._kinds = old, new
        self._same_kind = old.name == new.name
        # Squares of numbers of up to 32 bits are finite and no zeros in float64, and so are their sums.
        self._may_overflow = max(old.element_bytes, new.element_bytes) > 4
        self.changed = 0
        self._largest: float = 0
        self._old, self._new, self._change, self._dot = _Sum(), _Sum(), _Sum(), _Sum()
        # Of elements that were not finite before.
        self._mended = _Sum()
        self._nan, self._inf = [0, 0], [0, 0]
        self._left_out = False

    def add(self, old: Array, new: Array) -> None:
        """Add a part of the tensor, as bytes (uint8) of whole elements."""
        np = numpy()
        old_bytes, new_bytes = (kind.element_bytes for kind in self._kinds)
        for at in range(0, len(old) // old_bytes, _ELEMENTS_AT_ONCE):
            some = slice(at * old_bytes, (at + _ELEMENTS_AT_ONCE) * old_bytes)
            others = slice(at * new_bytes, (at + _ELEMENTS_AT_ONCE) * new_bytes)
            if self._same_kind and np.array_equal(old[some], new[others]):
                self.add_identical(old[some])
                continue
            # Signalling NaN, and differences beyond float64, are counted and not warned of.
            with np.errstate(all="ignore"):
                self._add_different(old[some], new[others])

    def add_identical(self, both: Array) -> None:
        """Add a part that is the same on both sides."""
        np, read = numpy(), self._kinds[0].read
        if read is None:
            return
        size = self._kinds[0].element_bytes
        for at in range(0, len(both), size * _ELEMENTS_AT_ONCE):
            with np.errstate(invalid="ignore"):
                values = read(both[at : at + size * _ELEMENTS_AT_ONCE])
            for side in (0, 1):
                finite = self._count(values, side)
            values = _as_floats(values if finite is None else values[finite])
            scaled, exponent = _scaled(values) if self._may_overflow else (values, 0)
            square = float(np.vdot(scaled, scaled).real)
            for total in (self._old, self._new, self._dot):
                total.add(square, 2 * exponent)

    def leave_out(self) -> None:
        """Note that a part that is the same on both sides is not read."""
        self._left_out = True

    def _add_different(self, old: Array, new: Array) -> None:
        read_old, read_new = self._kinds[0].read, self._kinds[1].read
        if self._same_kind:
            self.changed += _differing_elements(old, new, self._kinds[0].element_bytes)
        if read_old is None or read_new is None:
            return
        before, after = read_old(old), read_new(new)
        if not self._same_kind:
            self.changed += int((before != after).sum())
        masks = [mask for mask in (self._count(before, 0), self._count(after, 1)) if mask is not None]
        if masks:
            finite = masks[0] & masks[-1]
            values, exponent = _scaled(_as_floats(after[~finite & numpy().isfinite(after)]))
            self._mended.add(float(numpy().vdot(values, values).real), 2 * exponent)
            before, after = before[finite], after[finite]
        if not before.size:
            return
        change, quartered = _distance(before, after)
        largest = change.max()
        self._largest = max(
            self._largest, int(largest) if change.dtype.kind == "u" else float(largest) * 2.0**quartered
        )
        self._add_squares(_as_floats(before), _as_floats(after), _as_floats(change), quartered)

    def _add_squares(self, before: Array, after: Array, change: Array, quartered: int) -> None:
        np = numpy()
        old_exponent = new_exponent = change_exponent = 0
        if self._may_overflow:
            before, old_exponent = _scaled(before)
            after, new_exponent = _scaled(after)
            change, change_exponent = _scaled(change)
        self._old.add(float(np.vdot(before, before).real), 2 * old_exponent)
        self._new.add(float(np.vdot(after, after).real), 2 * new_exponent)
        self._change.add(float(np.vdot(change, change).real), 2 * (change_exponent + quartered))
        self._dot.add(float(np.vdot(before, after).real), old_exponent + new_exponent)

    def _count(self, values: Array, side: int) -> Array | None:
        """Count NaN and infinities of one side; return which elements are neither, None if all are."""
        np = numpy()
        finite = np.isfinite(values)
        if finite.all():
            return None
        nan = int(np.isnan(values).sum())
        self._nan[side] += nan
        self._inf[side] += int((~finite).sum()) - nan
        return finite

    def result(self, elements: int) -> ChangeFigures:
        """Return the figures of a tensor of so many elements."""
        counts = (self._nan[0], self._nan[1], self._inf[0], self._inf[1])
        if self._kinds[0].read is None or self._kinds[1].read is None:
            changed = self.changed if self._same_kind and self._kinds[0].read is not None else None
            return ChangeFigures(elements, changed, None, None, None, None, None, *counts)
        change = self._change.root()
        whole = _Sum()
        for part in (self._new, self._mended):
            whole.add(part.total, part.exponent)
        if self._left_out:
            return ChangeFigures(elements, self.changed, change, None, None, self._largest, None, *counts)
        return ChangeFigures(
            elements,
            self.changed,
            change,
            self._old.root(),
            self._change.root_of_ratio(self._old),
            self._largest,
            self._dot.cosine(self._old, self._new),
            *counts,
            whole.root(),
        )


class _Sum:
    """Sum of float64 numbers with an exponent of its own: ``total`` times two to the ``exponent``."""

    def __init__(self) -> None:
        self.total = 0.0
        self.exponent = 0

    def add(self, total: float, exponent: int) -> None:
        """Add ``total`` times two to the ``exponent``."""
        if not total:
            return
        if not self.total:
            self.total, self.exponent = total, exponent
            return
        highest = max(exponent, self.exponent)
        self.total = math.ldexp(self.total, self.exponent - highest) + math.ldexp(total, exponent - highest)
        self.exponent = highest

    def root(self) -> float:
        """Return the square root; the exponent is even."""
        return _times_power(math.sqrt(self.total), self.exponent // 2)

    def root_of_ratio(self, other: _Sum) -> float:
        """Return the root of the ratio of two sums of squares; 0 of two zeros."""
        if not other.total:
            return math.inf if self.total else 0.0
        ratio = math.sqrt(self.total) / math.sqrt(other.total)
        return _times_power(ratio, (self.exponent - other.exponent) // 2)

    def cosine(self, one: _Sum, other: _Sum) -> float | None:
        """Return this sum of products by the roots of two sums of squares; None if one of those is 0."""
        if not one.total or not other.total:
            return None
        ratio = self.total / math.sqrt(one.total) / math.sqrt(other.total)
        value = _times_power(ratio, self.exponent - one.exponent // 2 - other.exponent // 2)
        # Rounding may lead past the ends.
        return max(-1.0, min(1.0, value))


def _times_power(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def _differing_elements(old: Array, new: Array, element_bytes: int) -> int:
    """Return how many elements of two runs of bytes differ."""
    if element_bytes in (1, 2, 4, 8):
        return int((old.view(f"u{element_bytes}") != new.view(f"u{element_bytes}")).sum())
    return int((old != new).reshape(-1, element_bytes).any(axis=1).sum())


def _as_floats(values: Array) -> Array:
    return values.astype(numpy().float64) if values.dtype.kind in "iu" else values


def _scaled(values: Array) -> tuple[Array, int]:
    """Return numbers whose squares neither overflow nor vanish, and the power of two they were divided by."""
    np = numpy()
    largest = float(np.abs(values).max()) if values.size else 0.0
    if not largest or not math.isfinite(largest):
        return values, 0
    exponent = math.frexp(largest)[1]
    if abs(exponent) < _SAFE_EXPONENT:
        return values, 0
    # In two factors: two to the power of an exponent near the limit is no float64 itself.
    half = exponent // 2
    return values * 2.0**-half * 2.0 ** (half - exponent), exponent


def _distance(before: Array, after: Array) -> tuple[Array, int]:
    """Return the absolute differences, and the power of two by which they were divided, to be float64.

    For 64-bit integers of one kind they are exact, as uint64.
    """
    np = numpy()
    if before.dtype == after.dtype and before.dtype.kind in "iu":
        # Two's complement: the difference modulo 2**64 is the distance, which int64 may not hold.
        up = after.astype(np.uint64) - before.astype(np.uint64)
        return np.where(after >= before, up, np.uint64(0) - up), 0
    before, after = _as_floats(before), _as_floats(after)
    distance = np.abs(after - before)
    if np.isfinite(distance).all():
        return distance, 0
    # The numbers are finite, and their distance is beyond float64.
    return np.abs(after * 0.25 - before * 0.25), 2
