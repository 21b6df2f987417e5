"""Gradients of watched optimizers: whether a backward pass has added to them since a moment.

Looks at torch's own optimizers and those derived from them, at a few parameters of each. Another optimizer may
keep its gradients anywhere: of it nothing is known.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

# Parameters of each optimizer that are looked at, spread over all of them.
_SAMPLE: Final = 16


class Gradients:
    """Gradients of the optimizers of one training."""

    def __init__(self, capturing: Callable[[], bool] = lambda: False) -> None:
        """Begin without optimizers.

        Args:
            capturing: Returns whether nothing on a device may be read now.
        """
        self._capturing = capturing
        self._sampled: dict[int, tuple[Any, list[Any]]] = {}
        """Optimizers with the parameters that are looked at, by id."""
        self._used: dict[int, tuple[Any, int]] = {}
        """Gradients that the last step has used, by id of the parameter."""

    def add(self, optimizer: Any) -> None:
        """Look at an optimizer too."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(optimizer, torch.optim.Optimizer):
            return
        found = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        self._sampled[id(optimizer)] = (optimizer, found[:: max(1, len(found) // _SAMPLE)])

    def remove(self, optimizer: Any) -> None:
        """Look at an optimizer no longer."""
        self._sampled.pop(id(optimizer), None)

    @property
    def are_known(self) -> bool:
        """True if there are parameters to look at."""
        return any(parameters for _, parameters in self._sampled.values())

    def stepped(self, optimizer: Any) -> None:
        """Take the gradients of an optimizer as used: it has made its step."""
        _, parameters = self._sampled.get(id(optimizer), (None, ()))
        self._used |= _marked(parameters)

    def mark(self) -> dict[int, tuple[Any, int]]:
        """Return what `were_added` compares with."""
        return dict(mark for _, parameters in self._sampled.values() for mark in _marked(parameters).items())

    def were_added(self, since: dict[int, tuple[Any, int]]) -> bool:
        """Return whether a backward pass has added to a gradient since `mark`; setting it to zero does not count."""
        return self._capturing() or any(
            _any_added(parameters, since) for _, parameters in self._sampled.values()
        )

    def are_pending(self) -> bool:
        """Return whether gradients were added that no step has used.

        In every optimizer: the backward pass of one often adds to another's as well, which are then dropped (a GAN).
        """
        return (
            self.are_known
            and not self._capturing()
            and all(_any_added(found, self._used) for _, found in self._sampled.values() if found)
        )


def _any_added(parameters: Iterable[Any], since: Mapping[int, tuple[Any, int]]) -> bool:
    return any(
        one.grad is not None and _is_another(one.grad, since.get(id(one))) and _is_nonzero(one.grad)
        for one in parameters
    )


def _marked(parameters: Any) -> dict[int, tuple[Any, int]]:
    # Weakly: the memory of a gradient that the program drops must be free at once.
    return {
        id(one): (weakref.ref(one.grad), _version(one.grad)) for one in parameters if one.grad is not None
    }


def _is_another(gradient: Any, mark: tuple[Any, int] | None) -> bool:
    return mark is None or mark[0]() is not gradient or mark[1] != _version(gradient)


def _version(gradient: Any) -> int:
    return 0 if gradient.is_inference() else int(gradient._version)


def _is_nonzero(gradient: Any) -> bool:
    torch = sys.modules["torch"]
    # Of a sharded one the answer would be a collective call, and of a sparse one there is none.
    plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    try:
        return not plain or bool(gradient.detach().any())
    # Not for every dtype and device, and no reason to end a training.
    except RuntimeError:
        return True
