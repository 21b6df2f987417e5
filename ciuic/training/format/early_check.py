"""Check of a state before it is saved: values that cannot be stored are named when an object is registered."""

from __future__ import annotations

from typing import Any

from ciuic.training.format.structure import Json, Packer


def check_values(state: object, where: str) -> None:
    """Raise Unsaveable for a value that cannot be stored; arrays are not looked at.

    Those of a lazy module, or on the meta device, are there after the first step, and a shard is stored with
    those of other ranks.

    Args:
        state: The state.
        where: What the error calls it.

    Raises:
        Unsaveable: The message names the path of the value.
    """
    _ValuesAlone(where, with_shards=True).json(state, ())


class _ValuesAlone(Packer):
    def tensor(self, value: Any, path: tuple[str, ...]) -> Json:
        return None
