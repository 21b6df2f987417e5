"""safetensors: save of a checkpoint, and its load, cold and warm, as by a program that loads weights."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from benchmarks.suite import Job, Suite
from benchmarks.timing import MIB, preparation, rate

_MIB = 256
_TENSORS = 16


def _missing() -> str:
    for name in ("numpy", "safetensors"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return ""


_tensors: dict[str, Any] = {}


def _make_tensors(job: Job) -> None:
    numpy: Any = importlib.import_module("numpy")
    # Imported here, before the clock starts.
    importlib.import_module("safetensors.numpy")
    count = job.count(_MIB, _TENSORS) * MIB // 4 // _TENSORS
    generator = numpy.random.default_rng(1)
    for number in range(_TENSORS):
        _tensors[f"layer{number}"] = generator.random(count, dtype=numpy.float32)


def _megabytes() -> float:
    return sum(float(tensor.nbytes) for tensor in _tensors.values()) / 1e6


def _save(job: Job) -> float:
    importlib.import_module("safetensors.numpy").save_file(_tensors, job.path("model.safetensors"))
    return _megabytes()


def _load(job: Job) -> float:
    loaded = importlib.import_module("safetensors.numpy").load_file(job.path("model.safetensors"))
    # A tensor is a view of mapped pages, which are read only when they are accessed.
    for tensor in loaded.values():
        tensor.sum()
    return _megabytes()


SUITE = Suite(
    "tensors",
    (
        preparation(_make_tensors),
        rate("safetensors, save", "MB/s", _save),
        rate("safetensors, load cold", "MB/s", _load, before="cold"),
        rate("safetensors, load warm", "MB/s", _load, before="warm", repeat_seconds=0.3),
    ),
    missing=_missing,
)
