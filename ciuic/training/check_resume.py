"""`check_resume`: test whether a resumed run would be the same run.

It runs a few steps, restores the state from a real snapshot, and runs the same steps again: the result of
each step and the whole state after it must be equal to the last bit. The first difference is named: something
that is not registered, or that the machine does not compute twice alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ciuic.system.ownership import temporary_directory
from ciuic.training.format.structure import pack
from ciuic.training.format.tensors import Unsaveable
from ciuic.training.manager import SnapshotManager
from ciuic.training.state import stateful
from ciuic.training.state.stateful import load_into, state_of


@dataclass(frozen=True)
class Difference:
    """First difference between a run and the same run resumed."""

    step: int
    """Step after the snapshot, counted from 1; 0: the state itself did not come back unchanged."""
    where: str
    """Path in the state, or ``the result of the step``."""
    before: str
    """Value in the run itself."""
    after: str
    """Value in the resumed run."""

    def __str__(self) -> str:
        when = "as it was put back" if self.step == 0 else f"after step {self.step}"
        return f"{self.where} differs {when}: {self.before} in the run itself, {self.after} when resumed"


def check_resume(
    objects: dict[str, Any], train_step: Callable[[], Any], *, steps: int = 3
) -> Difference | None:
    """Run steps twice, the second time resumed from a snapshot, and compare.

    Afterwards everything is restored to what it was. The directory for temporary files needs room for one
    snapshot.

    Args:
        objects: Objects to register, by name.
        train_step: Runs one whole step, data included, and returns anything that can be compared, such as the
            loss.
        steps: Number of steps.

    Returns:
        The first difference; None if the resumed run is the same run.

    Raises:
        TypeError: An object has no state, or a value cannot be stored.
        OSError: The snapshot cannot be saved.
        Exception: Anything that ``train_step`` raises.
    """
    with (
        # Through a repository, not a copy in memory: what does not survive being stored is a difference too.
        tempfile.TemporaryDirectory(prefix="ciuic-check-", dir=temporary_directory()) as directory,
        SnapshotManager(f"{directory}/snapshots") as manager,
    ):
        # `set_objects`, not `register`: hooks and counted loaders must not stay on the program's objects.
        manager.framework.set_objects(objects)
        if manager.save_snapshot(wait=True) is None:
            raise OSError(f"the state cannot be saved: {manager.stats.last_error}")
        at_start = _flat(objects, None)
        run = [_flat(objects, train_step()) for _ in range(steps)]
        try:
            _put_back(manager, objects)
            found = _first_difference(0, at_start, _flat(objects, None))
            for number, expected in enumerate(run, 1):
                if found is not None:
                    break
                found = _first_difference(number, expected, _flat(objects, train_step()))
        finally:
            # Also after an error of `train_step`: the program continues with the state that it had.
            _put_back(manager, objects)
        return found


def _put_back(manager: SnapshotManager, objects: dict[str, Any]) -> None:
    state = manager.load_snapshot("latest")
    for name, value in objects.items():
        load_into(value, state[f"{name}_state_dict"], name)
    stateful.restore_random_states(state["random_state"])


def _flat(objects: dict[str, Any], result: Any) -> dict[str, str]:
    """Return every value by its path, as text or as a digest: equal texts mean equal bits."""
    flat: dict[str, str] = {}
    for name, value in (*objects.items(), ("random generators", None)):
        state = stateful.random_states() if value is None else state_of(value, name)
        _flatten(name, state, flat)
    try:
        _flatten("the result of the step", result, flat)
    except Unsaveable:
        flat["the result of the step"] = repr(result)
    return flat


def _flatten(name: str, state: Any, flat: dict[str, str]) -> None:
    packed = pack(state, name)
    for leaf in packed.leaves:
        flat[f"{name}.{leaf.name}"] = _digest(leaf.value)
    _flatten_skeleton(name, packed.skeleton, flat)


def _flatten_skeleton(path: str, skeleton: Any, flat: dict[str, str]) -> None:
    # Names of the packed form are no part of a path that the program would know.
    if isinstance(skeleton, dict):
        for key, value in skeleton.items():
            _flatten_skeleton(path if key in ("$", "items") else f"{path}.{key}", value, flat)
    elif isinstance(skeleton, list):
        for at, value in enumerate(skeleton):
            _flatten_skeleton(f"{path}.{at}", value, flat)
    else:
        flat.setdefault(path, repr(skeleton))


def _digest(value: Any) -> str:
    """Return the first values, for people, and a digest of the bytes."""
    import xxhash

    plain = value.detach().cpu().contiguous() if hasattr(value, "detach") else value
    # Bits, not values: NaN differs from itself, and -0.0 equals 0.0.
    if hasattr(plain, "untyped_storage"):
        import torch  # type: ignore[import-not-found, unused-ignore]

        # As bytes first: NumPy has no bfloat16 and no float8.
        raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    else:
        raw = plain.tobytes()
    digest, glimpse = xxhash.xxh3_128_hexdigest(raw), plain.reshape(-1)[:2].tolist()
    return f"{glimpse}… ({digest[:12]})"


def _first_difference(step: int, expected: dict[str, str], found: dict[str, str]) -> Difference | None:
    # In the order of the run itself: the first difference is the cause of later ones.
    for where in (*expected, *found):
        before, after = expected.get(where, "nothing"), found.get(where, "nothing")
        if before != after:
            return Difference(step, where, before, after)
    return None
