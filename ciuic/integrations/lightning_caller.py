"""Strategy and Trainer of Lightning on whose behalf a plugin is called, found in the call stack.

A `CheckpointIO` is told neither; Lightning calls it through both. In a thread, as of `AsyncCheckpointIO`, none is found.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

_AFTER_TEARDOWN: Final = ("on_fit_end", "teardown")
"""Hooks that the Trainer calls after the plugin's teardown, while its status still is that of a run."""


def calling_strategy() -> Any:
    """Return the strategy; None if there is none."""
    return _calling("checkpoint_io", "is_global_zero")


def calling_trainer() -> Any:
    """Return the Trainer; None if there is none."""
    return _calling("fit_loop", "strategy")


def is_outside_run(trainer: Any) -> bool:
    """Return whether the Trainer will not tear its plugins down before it returns to the program.

    Args:
        trainer: The Trainer; None, if it is not known: False.
    """
    if trainer is None:
        return False
    if trainer.state.status != "running":
        return True
    # A private attribute of Lightning, without which such a checkpoint stays a pointer until the next teardown.
    return getattr(trainer.lightning_module, "_current_fx_name", None) in _AFTER_TEARDOWN


def _calling(*attributes: str) -> Any:
    """Return the innermost caller whose method is running and that has these attributes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if all(hasattr(caller, name) for name in attributes):
            return caller
        frame = frame.f_back
    return None
