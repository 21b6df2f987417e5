"""State of every global random generator: Python's, NumPy's and torch's.

Only modules that have been imported are looked at: a generator that does not exist yet has drawn nothing.
"""

from __future__ import annotations

import random
import sys
from typing import Any


def state() -> dict[str, Any]:
    """Return the states of all global generators, on the CPU and on every device in use."""
    found: dict[str, Any] = {"python": random.getstate()}
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        # As a dict: the legacy tuple is for MT19937 alone.
        found["numpy"] = numpy_random.get_state(legacy=False)
    if torch is not None:
        found["torch"] = torch.get_rng_state()
        for name, device in _devices(torch):
            found[name] = device.get_rng_state_all()
        if _mps(torch) is not None:
            found["mps"] = torch.mps.get_rng_state()
    return found


def restore(found: dict[str, Any]) -> list[str]:
    """Restore the states; return a sentence for each generator that could not be restored."""
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
            # Another number of devices: those that both have get their state.
            if len(states) != device.device_count():
                problems.append(f"{name} had {len(states)} devices and has {device.device_count()}")
            for number, one in enumerate(states[: device.device_count()]):
                device.set_rng_state(one, number)
        if "mps" in found and _mps(torch) is not None:
            torch.mps.set_rng_state(found["mps"])
    return problems


def _devices(torch: Any) -> list[tuple[str, Any]]:
    """Return (name, torch module) of each kind of accelerator that this program has begun to use."""
    # Only those in use: asking for the state of any other would initialize that device.
    kinds = [(name, getattr(torch, name, None)) for name in ("cuda", "xpu")]
    return [(name, kind) for name, kind in kinds if kind is not None and kind.is_initialized()]


def _mps(torch: Any) -> Any:
    mps = getattr(torch.backends, "mps", None)
    return mps if mps is not None and mps.is_available() else None


def tupled(value: Any) -> Any:
    """Return the value with lists made tuples, as random.setstate requires."""
    return tuple(tupled(item) for item in value) if isinstance(value, (list, tuple)) else value
