"""Every random generator that the program can draw from without making one itself.

Only what has been imported is looked at: a generator that is not there yet has drawn nothing.
"""

from __future__ import annotations

import random
import sys
from typing import Any


def state() -> dict[str, Any]:
    """Of Python's, NumPy's and torch's global generators, on the CPU and on every device that is in use."""
    found: dict[str, Any] = {"python": random.getstate()}
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        found["numpy"] = numpy_random.get_state(legacy=False)
    if torch is not None:
        found["torch"] = torch.get_rng_state()
        for name, device in _devices(torch):
            found[name] = device.get_rng_state_all()
        if _mps(torch) is not None:
            found["mps"] = torch.mps.get_rng_state()
    return found


def restore(found: dict[str, Any]) -> list[str]:
    """Sets them back; returns what could not be, in words."""
    problems = []
    random.setstate(tupled(found["python"]))
    if "numpy" in found:
        import numpy.random

        numpy.random.set_state(found["numpy"])
    if "torch" in found:
        import torch  # type: ignore[import-not-found, unused-ignore]

        torch.set_rng_state(found["torch"])
        for name, device in _devices(torch):
            states = found.get(name)
            if states is None:
                continue
            if len(states) != device.device_count():
                problems.append(f"{name} had {len(states)} devices and has {device.device_count()}")
            for number, one in enumerate(states[: device.device_count()]):
                device.set_rng_state(one, number)
        if "mps" in found and _mps(torch) is not None:
            torch.mps.set_rng_state(found["mps"])
    return problems


def _devices(torch: Any) -> list[tuple[str, Any]]:
    """Kinds of accelerators with several devices each that this program has begun to use."""
    kinds = [(name, getattr(torch, name, None)) for name in ("cuda", "xpu")]
    return [(name, kind) for name, kind in kinds if kind is not None and kind.is_initialized()]


def _mps(torch: Any) -> Any:
    mps = getattr(torch.backends, "mps", None)
    return mps if mps is not None and mps.is_available() else None


def tupled(value: Any) -> Any:
    """random.setstate takes tuples alone."""
    return tuple(tupled(item) for item in value) if isinstance(value, (list, tuple)) else value
