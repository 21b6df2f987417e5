"""Losses of one training: no number any more, or a spike.

A value is a spike if it exceeds ``median + 10 * max(1.4826 * MAD, 0.7413 * IQR, 0.01 * |median|)``, with median, median absolute
deviation (MAD) and interquartile range (IQR) of the last 100 finite values before it, of which there must be 30. 1.4826 * MAD and 0.7413 * IQR are
the standard deviation of normal noise, which a few outliers do not move; the MAD alone is 0 where half of the values are alike.
The floor of one percent keeps a loss that hardly moves from spiking at noise. A loss that stays at a higher level is
no spike any more when half of the 100 values are of it.

References: P. J. Rousseeuw and C. Croux, "Alternatives to the Median Absolute Deviation", JASA 88 (1993).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final, Literal, NamedTuple

from ciuic.protocol.control_types import Severity

_WINDOW: Final = 100
_MIN_VALUES: Final = 30
_TIMES: Final = 10.0
_DEVIATION_OF_MAD: Final = 1.4826
_DEVIATION_OF_IQR: Final = 0.7413
_LEAST_SHARE: Final = 0.01
_CALM_VALUES: Final = 10
"""Ordinary values in a row that end a trouble."""


class LossTrouble(NamedTuple):
    """A loss that is not finite or spikes, with the step at which that began."""

    kind: Literal["not finite", "spike"]
    step: int
    value: float
    usual: float
    """Median before it; not a number where there were too few values."""


def trouble_text(trouble: LossTrouble, snapshot: str) -> tuple[str, str, Severity]:
    """Return what an alert says behind the name of the number, its hint and its severity.

    Args:
        trouble: the trouble.
        snapshot: the newest snapshot before it; empty if it is not known.
    """
    usual = "" if math.isnan(trouble.usual) else f"; it was {trouble.usual:.4g}"
    is_spike = trouble.kind == "spike"
    found = f"spiked to {trouble.value:.4g}" if is_spike else "is no finite number"
    hint = (
        f"the newest snapshot before it: {snapshot}"
        if snapshot
        else "ciuic list shows the snapshots before it"
    )
    return (
        f"{found} at step {trouble.step}{usual}",
        f"{hint}; ciuic hold keeps it",
        "warning" if is_spike else "problem",
    )


class LossWatch:
    """Looks at one value after the other."""

    def __init__(self) -> None:
        self.trouble: LossTrouble | None = None
        """The trouble that stands; a loss that is no number outranks a spike."""
        self.reported: LossTrouble | None = None
        """The trouble of which an alert speaks."""
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._calm = 0

    def add(self, step: int, value: float) -> None:
        """Take the loss of a step."""
        kind: Literal["", "not finite", "spike"] = ""
        usual = median(self._values) if len(self._values) >= _MIN_VALUES else math.nan
        if not math.isfinite(value):
            kind = "not finite"
        elif not math.isnan(usual):
            ordered = sorted(self._values)
            range_ = ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]
            mad = median(abs(one - usual) for one in ordered)
            deviation = max(_DEVIATION_OF_MAD * mad, _DEVIATION_OF_IQR * range_)
            # Of a loss that is 0 throughout nothing is a spike by chance alone.
            if value > usual + _TIMES * max(deviation, _LEAST_SHARE * abs(usual)):
                kind = "spike"
        if math.isfinite(value):
            self._values.append(value)
        if not kind:
            self._calm += 1
            if self._calm >= _CALM_VALUES:
                self.trouble = None
            return
        self._calm = 0
        if self.trouble is None or (kind, self.trouble.kind) == ("not finite", "spike"):
            self.trouble = LossTrouble(kind, step, value, usual)
