"""`check_resume`: whether a resumed run would be the same run, tried before it matters.

A few steps are run, the state is put back through a real snapshot, and the same steps are run again: what each step returned and the
whole state after it must be equal to the last bit. The first thing that is not is named, which is what nobody registered, or what the
machine does not compute twice alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ciuic.training import randomness
from ciuic.training.manager import SnapshotManager
from ciuic.training.stateful import load_into, state_of
from ciuic.training.structure import pack
from ciuic.training.tensors import Unsaveable


@dataclass(frozen=True)
class Difference:
    """The first thing that a resumed run does differently."""

    step: int
    """1 is the first step after the snapshot; 0: the state itself did not come back as it was."""
    where: str
    """Path in the state, or ``the result of the step``."""
    before: str
    after: str

    def __str__(self) -> str:
        when = "as it was put back" if self.step == 0 else f"after step {self.step}"
        return f"{self.where} differs {when}: {self.before} in the run itself, {self.after} when resumed"


def check_resume(
    objects: dict[str, Any], train_step: Callable[[], Any], *, steps: int = 3
) -> Difference | None:
    """None if the resumed run is the same run. ``objects``: what would be registered, by name. ``train_step``: one whole step, data
    included, that returns anything that can be compared (the loss, say).

    Takes ``steps`` steps twice and then puts everything back as it found it. Needs room for one snapshot in the directory for
    temporary files. TypeError for what has no state or cannot be stored; whatever ``train_step`` raises.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ciuic-check-") as directory,
        SnapshotManager(f"{directory}/snapshots") as manager,
    ):
        manager.take(objects)
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
            _put_back(manager, objects)
        return found


def _put_back(manager: SnapshotManager, objects: dict[str, Any]) -> None:
    state = manager.load_snapshot("latest")
    for name, value in objects.items():
        load_into(value, state[f"{name}_state_dict"], name)
    randomness.restore(state["random_state"])


def _flat(objects: dict[str, Any], result: Any) -> dict[str, str]:
    """Every value there is by its path, as text or as a digest: equal texts are equal bits."""
    flat: dict[str, str] = {}
    for name, value in (*objects.items(), ("random generators", None)):
        state = randomness.state() if value is None else state_of(value, name)
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
    if isinstance(skeleton, dict):
        for key, value in skeleton.items():
            _flatten_skeleton(path if key in ("$", "items") else f"{path}.{key}", value, flat)
    elif isinstance(skeleton, list):
        for at, value in enumerate(skeleton):
            _flatten_skeleton(f"{path}.{at}", value, flat)
    else:
        flat.setdefault(path, repr(skeleton))


def _digest(value: Any) -> str:
    """Of the bytes, with a glimpse of the values for people."""
    import xxhash

    plain = value.detach().cpu().contiguous() if hasattr(value, "detach") else value
    if hasattr(plain, "untyped_storage"):
        import torch  # type: ignore[import-not-found, unused-ignore]

        raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    else:
        raw = plain.tobytes()
    digest, glimpse = xxhash.xxh3_128_hexdigest(raw), plain.reshape(-1)[:2].tolist()
    return f"{glimpse}… ({digest[:12]})"


def _first_difference(step: int, expected: dict[str, str], found: dict[str, str]) -> Difference | None:
    for where in (*expected, *found):
        before, after = expected.get(where, "nothing"), found.get(where, "nothing")
        if before != after:
            return Difference(step, where, before, after)
    return None
