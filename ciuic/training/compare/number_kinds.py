"""Numbers of any stored dtype as arrays of NumPy, without the framework that saved them.

bfloat16 and the 8-bit floats have no dtype in NumPy and are widened here, without rounding. Of a dtype that
is not known, or holds no numbers, only the bytes can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ciuic.errors import CiuicError
from ciuic.training.format.tensors import safetensors_name

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
            "tensors can be compared only with NumPy, which is not installed", hint="pip install numpy"
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
        stored = safetensors_name(own) or stored
        if safetensors_name(own) is None:
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
