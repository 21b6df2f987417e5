"""Check that everything is registered that an exact resume needs.

What is missing is reported at the first save, not after the crash.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ciuic.training.state.stateful import is_keras_model


def missing(objects: Mapping[str, Any], *, has_position: bool) -> list[str]:
    """Return a sentence for each missing object, with what to do; empty if none is known to be missing."""
    notes = []
    values = list(objects.values())
    modules = [value for value in values if _is_module(value)]
    optimizers = [value for value in values if hasattr(value, "param_groups") and hasattr(value, "step")]
    if modules and not optimizers:
        notes.append("no optimizer is saved: a resumed run would start with fresh moments")
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if known and any(id(one) not in known for group in groups for one in group["params"]):
            notes.append(
                "the optimizer has parameters that are in no module that is saved: register their module"
            )
        # Schedulers of torch write the rate they began with into the groups.
        scheduled = any("initial_lr" in group for group in groups)
        if scheduled and not any(_schedules(value, optimizer) for value in values):
            notes.append("a learning rate scheduler is at work and is not saved: register(scheduler=…)")
    if "torch" in sys.modules and modules and not has_position:
        notes.append(
            "no data loader is registered: a resumed run begins its epoch again; register(loader=…), best a StatefulDataLoader"
        )
    return notes


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module) and not is_keras_model(value)


def _schedules(value: object, optimizer: object) -> bool:
    return getattr(value, "optimizer", None) is optimizer
