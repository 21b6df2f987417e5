"""Names of a module's tensors without the prefixes of its wrappers.

torch.compile adds ``_orig_mod``, and DistributedDataParallel a leading ``module``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_COMPILED: Final = "_orig_mod"
_PARALLEL: Final = "module"


def by_bare_name(keys: Iterable[str]) -> dict[str, str] | None:
    """Return the keys by their names without wrappers; None where two have the same."""
    bare = bare_names(keys)
    made = {name: key for key, name in bare.items()}
    return made if len(made) == len(bare) else None


def bare_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the name without wrappers of each key."""
    parts = {key: [part for part in key.split(".") if part != _COMPILED] for key in keys}
    # A leading ``module`` is a wrapper's only if every key has it: an AveragedModel has ``n_averaged`` beside.
    if all(own[:1] == [_PARALLEL] for own in parts.values() if own and own != [""]):
        parts = {key: own[1:] for key, own in parts.items()}
    return {key: ".".join(own) for key, own in parts.items()}
