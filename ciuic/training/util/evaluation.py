"""Detection of an evaluation, in which nothing that is saved changes except random generators.

The program is in an evaluation if every registered model that has the flag is out of training mode (torch's
``model.eval()``). The beginning of the model's weights is compared with what it was after the last step,
because some programs put an average of the weights into the model while they evaluate, and that must not be
saved as the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

# Few enough that taking them after each step costs nothing beside the step.
_SAMPLE_ELEMENTS: Final = 8


def evaluating(objects: Iterable[Any]) -> bool:
    """Return whether all models are out of training mode; False if none has the flag.

    Averages of weights (``update_parameters``) do not count: they are in training mode all the time.
    """
    flags = [
        value.training
        for value in objects
        if isinstance(getattr(value, "training", None), bool) and not hasattr(value, "update_parameters")
    ]
    return bool(flags) and not any(flags)


class WeightSample:
    """First elements of the first and the last parameter of each model."""

    def __init__(self, objects: Iterable[Any]) -> None:
        """Choose the parameters to sample."""
        self._parameters: list[Any] = []
        for value in objects:
            if isinstance(getattr(value, "training", None), bool) and callable(
                getattr(value, "parameters", None)
            ):
                # Views need contiguous memory, and empty parameters have no elements to compare.
                every = [one for one in value.parameters() if one.numel() and one.is_contiguous()]
                # Two are enough: an average that is put into the model replaces all of them.
                self._parameters += [*every[:1], *every[1:][-1:]]
        self._seen: list[Any] | None = None

    def take(self) -> None:
        """Remember the elements as they are after a step."""
        self._seen = [_start(one).clone() for one in self._parameters]

    def is_still(self) -> bool:
        """Return whether the elements are unchanged since `take`; False before the first step."""
        return self._seen is not None and all(
            bool((_start(one) == seen).all()) for one, seen in zip(self._parameters, self._seen, strict=True)
        )


def _start(parameter: Any) -> Any:
    return parameter.detach().view(-1)[:_SAMPLE_ELEMENTS]
