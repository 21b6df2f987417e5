"""Old names of the public interface, which work for one version and say what replaced them."""

from __future__ import annotations

import warnings


def warn_deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Issue a DeprecationWarning at the line of the program.

    Args:
        old: What the program has.
        new: What it should have instead.
        stacklevel: Frames up to the program, this function included.
    """
    warnings.warn(
        f"{old} is deprecated and goes with the next version of ciuic: use {new}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
