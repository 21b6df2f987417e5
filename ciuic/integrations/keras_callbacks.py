"""States of the other callbacks of a Keras `fit`, which decide by the epochs that they have seen.

Keras resets them when `fit` begins, so that after a resume EarlyStopping and ReduceLROnPlateau would count
anew, and `History` would lack the epochs before.

Guarantees: the attributes named in `_ATTRIBUTES` are saved and restored, by class and by place among the
callbacks of that class. Callbacks of other classes are left as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

import keras

from ciuic.training.logs import log

_ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "EarlyStopping": ("wait", "best", "best_epoch", "best_weights", "stopped_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
    "History": ("epoch", "history"),
}


class OtherCallbacks:
    """The callbacks of a `fit` beside our own."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._named: dict[str, Any] = {}
        for name in _ATTRIBUTES:
            known = [one for one in callbacks if isinstance(one, getattr(keras.callbacks, name))]
            self._named |= {f"{name}-{place}": one for place, one in enumerate(known)}
        self._loaded: dict[str, Any] = {}
        """State to restore when Keras has reset the callbacks."""

    @property
    def change_weights_at_end(self) -> bool:
        """True if one of them puts back the best weights when `fit` ends."""
        return any(
            getattr(one, "restore_best_weights", False) and one.best_weights is not None
            for one in self._named.values()
        )

    def state(self) -> dict[str, Any]:
        """Return the saved attributes by callback."""
        return {
            name: {key: getattr(one, key) for key in _attributes_of(name) if hasattr(one, key)}
            for name, one in self._named.items()
        }

    def load_later(self, state: dict[str, Any]) -> None:
        """Keep a state until `load`: Keras resets the callbacks behind us when `fit` begins."""
        self._loaded = state

    def load(self) -> None:
        """Restore the state that was kept, once."""
        loaded, self._loaded = self._loaded, {}
        for name, values in loaded.items():
            for key in _attributes_of(name):
                if name in self._named and key in values:
                    setattr(self._named[name], key, values[key])

    def end(self) -> None:
        """Restore the state at the end of a `fit` that had nothing left to do."""
        if not self._loaded:
            return
        self.load()
        for name, callback in self._named.items():
            if name.startswith("EarlyStopping"):
                # It was told of the end before it had its state, which may have the best weights.
                callback.on_train_end()


def other_callbacks(own: Any) -> OtherCallbacks:
    """Return the other callbacks of the `fit` that has just begun, and have ``own`` called after them.

    A snapshot at the end of an epoch has what they did there, such as a reduced learning rate.
    """
    # Keras does not tell a callback of the others, but their list is calling it.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList) and any(one is own for one in caller.callbacks):
            others = [one for one in caller.callbacks if one is not own]
            # A new list: Keras iterates over the old one at this moment.
            caller.callbacks = [*others, own]
            return OtherCallbacks(others)
        frame = frame.f_back
    log.warning("ciuic: no list of callbacks was found: their states are not saved")
    return OtherCallbacks([])


def _attributes_of(name: str) -> tuple[str, ...]:
    return _ATTRIBUTES.get(name.partition("-")[0], ())
