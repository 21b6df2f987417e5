"""Conversion of arrays of any framework to named, typed runs of bytes, and back.

A framework is used only if the program has imported it: `import ciuic` imports neither torch nor NumPy nor
TensorFlow. Dtype names are those of the safetensors format; a dtype without a name there is stored as bytes,
with the framework's own name beside it.

References:
    https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from math import prod
from typing import Any, Final, Literal, NamedTuple, cast

Framework = Literal["torch", "numpy"]
# NumPy has 64.
_MAX_DIMENSIONS: Final = 1024
_MAX_NUMBER: Final = 1 << 63

SAFETENSORS_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
# Tensors up to this size are loaded into storages of their own; larger ones share the buffer of their file.
_OWN_STORAGE_BYTES: Final = 128 << 10
_BYTES: Final = "U8"


class Array(NamedTuple):
    """Description of an array, without its elements."""

    framework: Framework
    """Framework whose kind of array is loaded."""
    dtype: str
    """Name in safetensors."""
    shape: tuple[int, ...]
    """Shape as stored: a dtype without a name in safetensors is stored as one run of U8."""
    size_bytes: int
    true_dtype: str = ""
    """The framework's own name of the dtype, where ``dtype`` does not tell."""
    true_shape: tuple[int, ...] = ()
    """Shape of the array, where ``shape`` is that of its bytes."""
    element_bytes: int = 1
    """Element size of the true dtype: frameworks may crash on elements that are not aligned to it."""


class Unsaveable(TypeError):
    """Error: a value cannot be stored and loaded unchanged without executing stored code."""


def is_array(value: object) -> bool:
    """Return whether a value is an array of a framework.

    `as_plain` may still refuse it, as it does object arrays.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    return _is_tensorflow(value)


def as_plain(value: Any) -> Any:
    """Return a torch tensor or NumPy array of the same content, without a copy where that is possible.

    Raises:
        Unsaveable: The array cannot be stored.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _plain_torch(torch, value)
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.hasobject or value.dtype.names:
            raise Unsaveable(f"a NumPy array of dtype {value.dtype}, which holds more than numbers")
        # A masked array would lose its mask, another subclass whatever it adds.
        if type(value) not in (numpy.ndarray, numpy.memmap):
            raise Unsaveable(f"a {type(value).__module__}.{type(value).__qualname__}: store the arrays in it")
        return value
    return value.numpy()


def describe(value: Any) -> Array:
    """Describe an array that `as_plain` returned."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        own_name = str(value.dtype).removeprefix("torch.")
        size_bytes = value.numel() * value.element_size()
        return _described(
            "torch",
            SAFETENSORS_NAMES.get(own_name),
            own_name,
            tuple(value.shape),
            size_bytes,
            value.element_size(),
        )
    own_name = numpy_name(value.dtype)
    # safetensors is little-endian; an array of the other byte order is stored as bytes with its own dtype.
    known = SAFETENSORS_NAMES.get(value.dtype.name) if value.dtype.isnative else None
    return _described("numpy", known, own_name, tuple(value.shape), value.nbytes, value.itemsize)


def is_sparse(value: object) -> bool:
    """Return whether a value is a sparse tensor of torch (`structure`)."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        # The cheap test first: almost all of thousands of tensors are strided.
        and value.layout is not torch.strided
        and str(value.layout).startswith("torch.sparse_")
        and value.device.type != "meta"
    )


def numpy_name(dtype: Any) -> str:
    """Return the name by which `numpy_dtype` finds a dtype.

    NumPy gives dtypes of ml_dtypes the kind of void, so their own name is used.
    """
    import numpy

    return str(dtype.name if dtype.kind == "V" and dtype.type is not numpy.void else dtype.str)


def numpy_dtype(name: str) -> Any:
    """Return the dtype of this name.

    Raises:
        ValueError: Neither NumPy nor ml_dtypes has it.
    """
    import numpy

    # SyntaxError: NumPy evaluates what stands between commas.
    with suppress(TypeError, SyntaxError):
        return numpy.dtype(name)
    try:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]

        return numpy.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError, TypeError):
        raise ValueError(f"this NumPy has no dtype {name}") from None


def torch_dtype(name: str) -> Any:
    """Return torch's dtype of a name that was stored, which may be that of anything in torch.

    Raises:
        ValueError: This torch has no such dtype.
    """
    import torch  # type: ignore[import-not-found, unused-ignore]

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name}")
    return dtype


def identity(value: Any) -> object:
    """Return a key that is equal for equal views of the same memory: tied weights are stored once."""
    torch = sys.modules.get("torch")
    # Tensors without elements all have the address 0, and are not tied by that.
    if torch is not None and isinstance(value, torch.Tensor) and value.numel():
        return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device
    return id(value)


class ArrayBuffer:
    """Range of shared memory that takes one array after another of the same shape and dtype."""

    def __init__(self, memory: memoryview, array: Array) -> None:
        """Use the memory for arrays of one description."""
        self._memory = memory
        self._array = array
        self._target: Any = None

    def fill(self, value: Any) -> None:
        """Copy the elements, in row-major order.

        Args:
            value: Array from `as_plain` that fits the description.
        """
        if not self._array.size_bytes:
            return
        if self._array.framework == "torch":
            target, plain = copyable(self.target(value), value.detach())
            target.copy_(plain)
        else:
            self.target(value)[...] = value

    def target(self, value: Any) -> Any:
        """Return the memory as a host array like ``value``, for callers that copy the elements themselves."""
        if self._target is None:
            # Once for each layout: a save is then one copy for each tensor and little else.
            self._target = self._view(value)
        return self._target

    def _view(self, value: Any) -> Any:
        if self._array.framework == "torch":
            torch = sys.modules["torch"]
            return torch.frombuffer(self._memory, dtype=torch.uint8).view(value.dtype).view(value.shape)
        numpy = sys.modules["numpy"]
        return numpy.frombuffer(self._memory, dtype=value.dtype).reshape(value.shape)


def outside_inference_mode() -> AbstractContextManager[object]:
    """Return a context in which tensors can be created that may be changed anywhere.

    A tensor that was created in torch's inference mode cannot be changed outside of it.
    """
    torch = sys.modules.get("torch")
    return (
        nullcontext() if torch is None else cast(AbstractContextManager[object], torch.inference_mode(False))
    )


def copyable(target: Any, value: Any) -> tuple[Any, Any]:
    """Return views of two tensors that torch can copy: it has no copy for dtypes of less than a byte."""
    if value.dtype.itemsize == 1 and value.is_contiguous():
        return target.view(sys.modules["torch"].uint8), value.view(sys.modules["torch"].uint8)
    return target, value


def empty_buffer(size_bytes: int) -> tuple[Any, memoryview]:
    """Allocate a buffer for `from_buffer`, aligned for any dtype.

    Returns:
        The owner of the memory, and the memory.
    """
    torch = sys.modules.get("torch")
    # Memory of torch rather than of Python: a tensor on it needs no copy and is aligned for any dtype.
    if torch is not None and size_bytes:
        owner = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return owner, memoryview(owner.numpy()) if "numpy" in sys.modules else _bytes_of(owner, size_bytes)
    room = bytearray(size_bytes)
    return room, memoryview(room)


def from_buffer(owner: Any, offset: int, array: Array) -> Any:
    """Return the array in a buffer: a torch tensor if it was one and torch is imported, else a NumPy array.

    Args:
        owner: Owner that `empty_buffer` returned.
        offset: Offset of the first byte.
        array: Description of the array.

    Raises:
        ValueError: The framework does not know the dtype.
    """
    torch = sys.modules.get("torch")
    shape = array.true_shape if array.true_dtype else array.shape
    if array.framework == "torch" and torch is not None:
        dtype = torch_dtype(array.true_dtype or _own_name(array.dtype))
        if not array.size_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        data = owner[offset : offset + array.size_bytes]
        small = array.size_bytes <= _OWN_STORAGE_BYTES or array.size_bytes * 2 < owner.numel()
        if small or data.storage_offset() % dtype.itemsize:
            # One of many tensors must not keep the others in memory. And torch reads the state of a random
            # generator from the beginning of its storage: with a view at an offset set_rng_state read the
            # header of the file, a segmentation fault.
            data = data.clone()
        return data.view(dtype).view(shape)
    import numpy

    if array.framework == "torch":
        name = array.true_dtype or _own_name(array.dtype)
        # Without torch a bfloat16 array comes as raw bytes: NumPy has no such numbers.
        dtype = numpy_dtype("V2" if name == "bfloat16" else name)
    else:
        dtype = numpy_dtype(array.true_dtype or _own_name(array.dtype))
    raw = owner if isinstance(owner, bytearray) else owner.numpy()
    return numpy.frombuffer(raw, dtype=dtype, count=prod(shape), offset=offset).reshape(shape)


def _described(
    framework: Framework,
    known: str | None,
    own_name: str,
    shape: tuple[int, ...],
    size_bytes: int,
    element_bytes: int,
) -> Array:
    if known is not None:
        return Array(framework, known, shape, size_bytes, element_bytes=element_bytes)
    return Array(framework, _BYTES, (size_bytes,), size_bytes, own_name, shape, element_bytes)


def _plain_torch(torch: Any, value: Any) -> Any:
    # By exact type first: 16,000 tensors of a model of 4,000 parameters with Adam's moments take 129 ms so,
    # and 208 ms if each is checked for odd kinds.
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        _check_kind(torch, value)
    if value.layout is not torch.strided or value.is_nested:
        raise Unsaveable(f"a tensor of layout {value.layout}: store the tensors that it consists of")
    if value.is_quantized:
        raise Unsaveable("a quantized tensor: store its int_repr() and its scales")
    if value.device.type == "meta":
        raise Unsaveable("a tensor on the meta device, which has no content")
    # Such a view has a flag in place of other numbers: its memory alone is not its value.
    if value.is_conj() or value.is_neg():
        return value.resolve_conj().resolve_neg()
    return value


def _check_kind(torch: Any, value: Any) -> None:
    if type(value).__name__ == "DTensor":
        raise Unsaveable(
            "a DTensor, of which each rank has a part: "
            "every rank must create the manager and call the same methods of it"
        )
    if torch.nn.parameter.is_lazy(value):
        raise Unsaveable(
            "a parameter of a lazy module that has not seen a batch yet: save after the first one"
        )
    # Its content may be kept elsewhere than in its storage (torchao), and its class would not come back.
    kind = type(value)
    raise Unsaveable(
        f"a {kind.__module__}.{kind.__qualname__}, a tensor subclass: "
        "store the tensors that it consists of, or ciuic.training.register_type the class"
    )


def _is_tensorflow(value: object) -> bool:
    """Return whether a value is a variable or tensor of TensorFlow or Keras."""
    # By module name: TensorFlow is never imported from here.
    module = type(value).__module__
    return module.partition(".")[0] in ("tensorflow", "keras") and callable(getattr(value, "numpy", None))


def _own_name(dtype: str) -> str:
    for own, name in SAFETENSORS_NAMES.items():
        if name == dtype:
            return own
    raise ValueError(f"the dtype {dtype} is not known")


def _bytes_of(owner: Any, size_bytes: int) -> memoryview:
    import ctypes

    # Without NumPy a tensor has no buffer interface.
    return memoryview((ctypes.c_char * size_bytes).from_address(owner.data_ptr())).cast("B")


def is_dtype(name: str) -> bool:
    """Return whether a name is one of the safetensors dtypes that ciuic writes."""
    return name in SAFETENSORS_NAMES.values()


def dtype_bytes(name: str) -> int:
    """Return the size of one element.

    Raises:
        ValueError: ciuic does not write this dtype.
    """
    if not is_dtype(name):
        raise ValueError(f"the dtype {name} is not known")
    # All other names end in the number of bits.
    if name == "BOOL" or name.startswith("F8"):
        return 1
    return int(name.lstrip("BFIU")) // 8


def stored_shape(stored: Any) -> tuple[int, ...]:
    """Return a shape of a document, before anything is computed with it.

    Text times a large number would be a text of that size, and a product of a million numbers takes minutes.

    Raises:
        ValueError: It is no list of a few numbers from 0, of 63 bits.
    """
    # Integers only: 2.0 and True compare equal to integers, and [-1, -8] has as many elements as [8].
    if (
        not isinstance(stored, list)
        or len(stored) > _MAX_DIMENSIONS
        or not all(type(one) is int and 0 <= one < _MAX_NUMBER for one in stored)
    ):
        raise ValueError(f"a shape must be a list of numbers from 0, got {str(stored)[:100]}")
    return tuple(stored)
