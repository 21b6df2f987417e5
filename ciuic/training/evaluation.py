"""Whether the program is within an evaluation, in which nothing of what is saved changes but generators.

It is if every registered model that has the flag is out of training mode (torch's ``model.eval()``). What the model's weights begin
with is compared to what they were after the last step: some programs put an average of the weights into the model while they evaluate, and
that must not be saved as the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

_ELEMENTS: Final = 8


def evaluating(objects: Iterable[Any]) -> bool:
    """False where nothing tells. Averages of weights are in training mode for ever."""
    flags = [
        value.training
        for value in objects
        if isinstance(getattr(value, "training", None), bool) and not hasattr(value, "update_parameters")
    ]
    return bool(flags) and not any(flags)


class Glimpse:
    """The first elements of the first and the last parameter of each model."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._parameters: list[Any] = []
        for value in objects:
            if isinstance(getattr(value, "training", None), bool) and callable(
                getattr(value, "parameters", None)
            ):
                every = [one for one in value.parameters() if one.numel() and one.is_contiguous()]
                self._parameters += [*every[:1], *every[1:][-1:]]
        self._seen: list[Any] | None = None

    def take(self) -> None:
        """After a step."""
        self._seen = [_start(one).clone() for one in self._parameters]

    def is_still(self) -> bool:
        """Whether they are what they were; False before the first step."""
        return self._seen is not None and all(
            bool((_start(one) == seen).all()) for one, seen in zip(self._parameters, self._seen, strict=True)
        )


def _start(parameter: Any) -> Any:
    return parameter.detach().view(-1)[:_ELEMENTS]
