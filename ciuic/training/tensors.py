"""Arrays of whichever framework the trainer uses, as named, typed runs of bytes; and back.

A framework is looked at only when the program has imported it: `import ciuic` costs nothing of torch, NumPy or TensorFlow.
Dtype names are those of the safetensors format (https://github.com/huggingface/safetensors); what it has no name for is
stored as bytes, and its own name is kept beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import prod
from typing import Any, Final, Literal, NamedTuple, cast

Framework = Literal["torch", "numpy"]

_TORCH_DTYPES: Final = {
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
_OWN_STORAGE_BYTES: Final = 128 << 10
"""Tensors up to this size are loaded into storages of their own."""
_BYTES: Final = "U8"


class Array(NamedTuple):
    """What there is to know of an array without looking at its elements."""

    framework: Framework
    """Whose kind of array is to come back."""
    dtype: str
    """safetensors' name."""
    shape: tuple[int, ...]
    """As stored: a dtype without a name there is stored as one run of U8."""
    size_bytes: int
    true_dtype: str = ""
    """The framework's own name, where ``dtype`` does not say it."""
    true_shape: tuple[int, ...] = ()
    element_bytes: int = 1
    """Of the true dtype: frameworks may crash on elements that do not lie at a multiple of it."""


class Unsaveable(TypeError):
    """A value that cannot be stored and come back as it was without running somebody's code."""


def is_array(value: object) -> bool:
    """Whether it is stored as a tensor. Object arrays are not, and are refused by who asks further."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    return _is_tensorflow(value)


def as_plain(value: Any) -> Any:
    """A torch tensor or NumPy array of the same content, without a copy where that is possible; Unsaveable."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _plain_torch(torch, value)
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.hasobject or value.dtype.names:
            raise Unsaveable(f"a NumPy array of dtype {value.dtype}, which holds more than numbers")
        if type(value) not in (numpy.ndarray, numpy.memmap):
            raise Unsaveable(f"a {type(value).__module__}.{type(value).__qualname__}: store the arrays in it")
        return value
    return value.numpy()


def describe(value: Any) -> Array:
    """Of what `as_plain` returned."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        own_name = str(value.dtype).removeprefix("torch.")
        size_bytes = value.numel() * value.element_size()
        return _described(
            "torch",
            _TORCH_DTYPES.get(own_name),
            own_name,
            tuple(value.shape),
            size_bytes,
            value.element_size(),
        )
    own_name = numpy_name(value.dtype)
    known = _TORCH_DTYPES.get(value.dtype.name) if value.dtype.isnative else None
    return _described("numpy", known, own_name, tuple(value.shape), value.nbytes, value.itemsize)


def is_sparse(value: object) -> bool:
    """Whether it is one of torch's that is made of dense ones (sparse.py)."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and value.layout is not torch.strided  # almost all of them, and there are thousands
        and str(value.layout).startswith("torch.sparse_")
        and value.device.type != "meta"
    )


def numpy_name(dtype: Any) -> str:
    """By which `numpy_dtype` finds it. Kinds of numbers from outside NumPy (ml_dtypes) call themselves void there."""
    import numpy

    return str(dtype.name if dtype.kind == "V" and dtype.type is not numpy.void else dtype.str)


def numpy_dtype(name: str) -> Any:
    """ValueError where nobody has it."""
    import numpy

    with suppress(TypeError):
        return numpy.dtype(name)
    try:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]

        return numpy.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError, TypeError):
        raise ValueError(f"this NumPy has no dtype {name}") from None


def identity(value: Any) -> object:
    """Equal for two arrays that are the same memory seen in the same way: tied weights are stored once."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.numel():
        return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device
    return id(value)


class Place:
    """A run of shared memory that takes one array after another of the same kind."""

    def __init__(self, memory: memoryview, array: Array) -> None:
        self._memory = memory
        self._array = array
        self._target: Any = None

    def fill(self, value: Any) -> None:
        """Copies the elements, in row-major order. ``value``: from `as_plain`, of the kind that was described."""
        if not self._array.size_bytes:
            return
        if self._array.framework == "torch":
            target, plain = copyable(self.target(value), value.detach())
            target.copy_(plain)
        else:
            self.target(value)[...] = value

    def target(self, value: Any) -> Any:
        """The memory as an array of this kind, on the host: for who copies the elements by himself."""
        if self._target is None:
            self._target = self._view(value)
        return self._target

    def _view(self, value: Any) -> Any:
        if self._array.framework == "torch":
            torch = sys.modules["torch"]
            return torch.frombuffer(self._memory, dtype=torch.uint8).view(value.dtype).view(value.shape)
        numpy = sys.modules["numpy"]
        return numpy.frombuffer(self._memory, dtype=value.dtype).reshape(value.shape)


def normally() -> AbstractContextManager[object]:
    """Tensors that are made within may be changed in place anywhere. What is made in torch's inference mode may not be outside of it."""
    torch = sys.modules.get("torch")
    return (
        nullcontext() if torch is None else cast(AbstractContextManager[object], torch.inference_mode(False))
    )


def copyable(target: Any, value: Any) -> tuple[Any, Any]:
    """Two tensors of torch that are to be copied, as it can copy them: some dtypes have no copy of their own (those of less than a
    byte)."""
    if value.dtype.itemsize == 1 and value.is_contiguous():
        return target.view(sys.modules["torch"].uint8), value.view(sys.modules["torch"].uint8)
    return target, value


def empty_buffer(size_bytes: int) -> tuple[Any, memoryview]:
    """(owner, its bytes): room for content that becomes one array, aligned for any dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and size_bytes:
        owner = torch.empty(size_bytes, dtype=torch.uint8)
        return owner, memoryview(owner.numpy()) if "numpy" in sys.modules else _bytes_of(owner, size_bytes)
    room = bytearray(size_bytes)
    return room, memoryview(room)


def from_buffer(owner: Any, offset: int, array: Array) -> Any:
    """The array whose bytes begin at ``offset`` of what `empty_buffer` returned: torch's where torch is imported and it was
    torch's, else NumPy's. ValueError where neither is there, or the dtype is not known to it."""
    torch = sys.modules.get("torch")
    shape = array.true_shape if array.true_dtype else array.shape
    if array.framework == "torch" and torch is not None:
        name = array.true_dtype or _own_name(array.dtype)
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {name}")
        if not array.size_bytes:
            return torch.empty(shape, dtype=dtype)
        data = owner[offset : offset + array.size_bytes]
        small = array.size_bytes <= _OWN_STORAGE_BYTES or array.size_bytes * 2 < owner.numel()
        if small or data.storage_offset() % dtype.itemsize:
            # One of many must not keep them all in memory; and torch reads a generator's state from where its storage begins.
            data = data.clone()
        return data.view(dtype).view(shape)
    import numpy

    if array.framework == "torch":
        name = array.true_dtype or _own_name(array.dtype)
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
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        _check_kind(torch, value)
    if value.layout is not torch.strided or value.is_nested:
        raise Unsaveable(f"a tensor of layout {value.layout}: store the tensors that it is made of")
    if value.is_quantized:
        raise Unsaveable("a quantized tensor: store its int_repr() and its scales")
    if value.device.type == "meta":
        raise Unsaveable("a tensor on the meta device, which has no content")
    if value.is_conj() or value.is_neg():
        return value.resolve_conj().resolve_neg()
    return value


def _check_kind(torch: Any, value: Any) -> None:
    if type(value).__name__ == "DTensor":
        raise Unsaveable(
            "a DTensor, of which each rank has a part: every rank has to make the manager and call the same of its methods"
        )
    if torch.nn.parameter.is_lazy(value):
        raise Unsaveable(
            "a parameter of a lazy module that has not seen a batch yet: save after the first one"
        )
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(value)
        raise Unsaveable(
            f"a {kind.__module__}.{kind.__qualname__}, a tensor of its own kind: store the tensors that it is made of"
        )


def _is_tensorflow(value: object) -> bool:
    """Variables and tensors of TensorFlow and Keras."""
    module = type(value).__module__
    return module.partition(".")[0] in ("tensorflow", "keras") and callable(getattr(value, "numpy", None))


def _own_name(dtype: str) -> str:
    for own, name in _TORCH_DTYPES.items():
        if name == dtype:
            return own
    raise ValueError(f"the dtype {dtype} is not known")


def _bytes_of(owner: Any, size_bytes: int) -> memoryview:
    import ctypes

    return memoryview((ctypes.c_char * size_bytes).from_address(owner.data_ptr())).cast("B")


def is_dtype(name: str) -> bool:
    """Whether it is one of safetensors' names that we write."""
    return name in _TORCH_DTYPES.values()


def dtype_bytes(name: str) -> int:
    """Size of one element. ValueError for a name that we do not write."""
    if not is_dtype(name):
        raise ValueError(f"the dtype {name} is not known")
    if name == "BOOL" or name.startswith("F8"):
        return 1
    return int(name.lstrip("BFIU")) // 8


def count(shape: Sequence[int]) -> int:
    """Elements of an array of this shape."""
    return prod(shape)
