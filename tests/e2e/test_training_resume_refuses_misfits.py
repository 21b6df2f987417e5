"""`SnapshotManager.resume` with objects that do not fit: it raises, and nothing at all has changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch

from ciuic import SnapshotManager
from ciuic.training.state.stateful import renamed_as


class Scheduler:
    """Object that finds out in the middle of loading that its state does not fit."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rate = kind, 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "kind": self.kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state["rate"]
        if state["kind"] != self.kind:
            raise ValueError("another kind of scheduler")


def extra(word: str) -> Any:
    """Return a module with a state of its own."""

    class Extra(torch.nn.Linear):
        """Module with a state that is no tensor, which it refuses after having taken it."""

        def __init__(self, word: str) -> None:
            super().__init__(4, 4)
            self.word = self._accepts = word

        def get_extra_state(self) -> Any:
            return {"word": self.word}

        def set_extra_state(self, state: Any) -> None:
            self.word = state["word"]
            if self.word != self._accepts:
                raise ValueError("another word")

    return Extra(word)


def model(hidden: int = 8, *, layers: int = 1) -> Any:
    middle = [torch.nn.Linear(hidden, hidden) for _ in range(layers)]
    return torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.BatchNorm1d(hidden), *middle)


def trained(net: Any, *, groups: int = 1, kind: str = "AdamW") -> Any:
    parameters = list(net.parameters())
    optimizer = getattr(torch.optim, kind)(
        [{"params": parameters[at::groups]} for at in range(groups)], lr=0.1
    )
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(6, 4)).sum().backward()
        optimizer.step()
    return optimizer


def site(net: Any, *, groups: int = 1, kind: str = "cosine", word: str = "a") -> dict[str, Any]:
    """Return objects as a training registers them, with random contents."""
    return {
        "history": {"losses": [random.random()], "best": {"value": random.random()}},
        "scheduler": Scheduler(kind),
        "extra": extra(word),
        "model": net,
        "optimizer": trained(net, groups=groups),
        "generator": torch.Generator().manual_seed(random.randrange(1 << 30)),
    }


def contents(objects: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of everything that a resume could change."""
    found = {
        name: copy.deepcopy(value if isinstance(value, dict) else value.state_dict())
        for name, value in objects.items()
        if name != "generator"
    }
    return {
        **found,
        "generator": objects["generator"].get_state().clone(),
        "torch": torch.get_rng_state().clone(),
        "python": random.getstate(),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def _deeper() -> dict[str, Any]:
    return site(model(layers=2))


def _wider() -> dict[str, Any]:
    return site(model(16))


def _in_double() -> dict[str, Any]:
    made = site(model())
    made["model"].double()
    return made


def _two_groups() -> dict[str, Any]:
    return site(model(), groups=2)


def _another_scheduler() -> dict[str, Any]:
    return site(model(), kind="step")


def _another_word() -> dict[str, Any]:
    return site(model(), word="b")


def _fewer_parameters() -> dict[str, Any]:
    made = site(model())
    made["optimizer"] = torch.optim.AdamW(made["model"][0].parameters(), lr=0.1)
    return made


def _parameters_in_another_order() -> dict[str, Any]:
    made = site(model())
    reordered = list(made["model"].parameters())[::-1]
    made["optimizer"] = torch.optim.AdamW(reordered, lr=0.1)
    return made


MISFITS: tuple[tuple[Callable[[], dict[str, Any]], str], ...] = (
    (_deeper, "model cannot load"),
    (_wider, "model cannot load"),
    (_in_double, "float64 here and float32 there"),
    (_two_groups, "2 parameter groups, and 1 were saved"),
    (_another_scheduler, "another kind of scheduler"),
    (_another_word, "another word"),
    (_fewer_parameters, "parameters, and"),
    (_parameters_in_another_order, "has the shape"),
)


@pytest.mark.parametrize("order", ["as registered", "reversed"])
@pytest.mark.parametrize(("misfit", "message"), MISFITS)
def test_a_resume_that_fails_has_changed_nothing(
    misfit: Callable[[], dict[str, Any]], message: str, order: str, tmp_path: Path
) -> None:
    """Objects that do not fit leave every registered object and every random generator as they were."""
    with SnapshotManager(tmp_path / "s") as manager:
        manager.framework.set_objects(site(model()))
        assert manager.save_snapshot(wait=True)
    objects = misfit()
    if order == "reversed":
        objects = dict(reversed(objects.items()))
    inner = objects["history"]["best"]
    before = contents(objects)
    with SnapshotManager(tmp_path / "s") as manager:
        manager.framework.set_objects(objects)
        with pytest.raises(ValueError, match=message):
            manager.resume()
        assert manager.step == 0
    after = contents(objects)
    assert [name for name in before if not equal(before[name], after[name])] == []
    assert objects["history"]["best"] is inner


def test_a_model_without_memory_is_not_resumed(tmp_path: Path) -> None:
    """Parameters on the meta device are refused by name, since torch would leave them there with a warning."""
    with SnapshotManager(tmp_path / "s") as manager:
        manager.framework.set_objects({"model": model()})
        assert manager.save_snapshot(wait=True)
    with torch.device("meta"):
        empty = model()
    with SnapshotManager(tmp_path / "s") as manager:
        manager.framework.set_objects({"model": empty})
        with pytest.raises(ValueError, match=r"0\.weight.*meta device.*to_empty"):
            manager.resume()
        empty.to_empty(device="cpu")
        assert manager.resume() is not None


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda net: net,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "parallel": lambda net: _parallel(net),
    "compiled parallel": lambda net: torch.compile(_parallel(net), backend="eager"),
    "parallel compiled": lambda net: _parallel(torch.compile(net, backend="eager")),
}


def _parallel(net: Any) -> Any:
    """Return the module as DistributedDataParallel would have it."""

    class _Parallel(torch.nn.Module):
        """Module with the names that DistributedDataParallel gives to parameters."""

        def __init__(self, net: Any) -> None:
            super().__init__()
            self.module = net

        def forward(self, x: Any) -> Any:
            return self.module(x)

    return _Parallel(net)


@pytest.mark.parametrize("saved", WRAPPERS)
@pytest.mark.parametrize("resumed", WRAPPERS)
def test_states_of_wrapped_models_fit_one_another(saved: str, resumed: str) -> None:
    """The state of a compiled or parallel model fits a plain one, and the other way round."""
    first, second = model(), model()
    target = WRAPPERS[resumed](second)
    target.load_state_dict(renamed_as(target, WRAPPERS[saved](first).state_dict()))
    assert equal(first.state_dict(), second.state_dict())


def test_a_compiled_model_resumes_a_plain_one(tmp_path: Path) -> None:
    """A snapshot of a compiled model resumes the same model before it is compiled, to the same bits."""
    first, second = model(), model()
    with SnapshotManager(tmp_path / "s") as manager:
        manager.framework.set_objects({"model": WRAPPERS["compiled"](first)})
        assert manager.save_snapshot(wait=True)
    with SnapshotManager(tmp_path / "s") as manager:
        manager.framework.set_objects({"model": second})
        assert manager.resume() is not None
    assert equal(first.state_dict(), second.state_dict())


def test_an_averaged_model_keeps_its_names() -> None:
    """The module of an AveragedModel is its own name, and not a wrapper's, because of ``n_averaged`` beside."""
    average = torch.optim.swa_utils.AveragedModel(model())
    plain = model().state_dict()
    assert renamed_as(average, plain) is plain


def test_versions_of_modules_follow_their_names() -> None:
    """A renamed state has the version of each module, without which BatchNorm would add a counter of zero."""
    compiled = torch.compile(model(), backend="eager")
    renamed = renamed_as(model(), compiled.state_dict())
    assert renamed._metadata["1"] == {"version": 2}
