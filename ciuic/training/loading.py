"""States read back for a manager: the newest that is whole, on one rank or on all, and put into what is registered.

Guarantees: what is damaged is passed over, and marked so that later snapshots store it anew. Several ranks get the same snapshot or all
get the same error. Nothing is changed in any object before the whole state was read and has all that is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ciuic.errors import CiuicError, Damaged
from ciuic.repository import Repository
from ciuic.training import marks, randomness, rank_state
from ciuic.training.logs import log, quietly
from ciuic.training.outcome import State
from ciuic.training.ranks import Ranks
from ciuic.training.reading import NothingGood, PassedOver, load, newest_good
from ciuic.training.shards import Like
from ciuic.training.stateful import load_into

_TRIES: Final = 5


def load_latest(save_dir: Path, root: bytes, likes: Mapping[str, Like] | None = None) -> State | None:
    """The newest state that is whole; None if there is no snapshot. Damaged (`NothingGood`) if there are some and none is whole.

    ``likes``: of objects of which this rank has a part; without it everything is whole."""
    loaded = None
    for more in reversed(range(_TRIES)):
        with Repository.open(save_dir) as repository:
            candidates = repository.snapshots.list(root=root)
        try:
            loaded = newest_good(str(save_dir), candidates, likes)
        except NothingGood as error:
            if more and _any_is_gone(save_dir, error.passed_over):
                continue
            raise
        if loaded is None or not (more and _any_is_gone(save_dir, loaded.passed_over)):
            break
    if loaded is None:
        return None
    for id_, reason in loaded.passed_over:
        log.warning("ciuic: %s is passed over: %s", id_, reason)
    _mark(save_dir, loaded.passed_over)
    return State(loaded)


def _any_is_gone(save_dir: Path, passed_over: Iterable[PassedOver]) -> bool:
    """Whether a training that saves meanwhile has removed one while it was read: there are newer ones then."""
    with Repository.open(save_dir) as repository:
        return not repository.snapshots.names().issuperset(one.id for one in passed_over)


def load_given(save_dir: Path, snapshot: str) -> State:
    """NotFound; Damaged; ValueError."""
    with Repository.open(save_dir) as repository:
        id_ = repository.snapshots.resolve(snapshot)
    return State(load(str(save_dir), id_))


def load_together(
    ranks: Ranks,
    save_dir: Path,
    root: bytes,
    likes: Mapping[str, Like],
    find: Callable[[], State | None] | None = None,
) -> State | None:
    """The newest that every rank can read (or the one that rank 0 finds by ``find``), of which each reads what it needs, with what was this
    rank's own. Whatever is wrong on one of them is raised on all."""
    passed_over: list[PassedOver] = []
    for id_ in _candidates(ranks, save_dir, root, find):
        state, reason, problem = None, "", ""
        try:
            state = State(load(str(save_dir), id_, likes))
        except (CiuicError, ValueError) as error:
            reason = str(error)
        except OSError as error:  # says nothing of the snapshot
            problem = str(error)
        if found := ranks.first_problem(problem):
            raise Damaged(f"{id_} cannot be read by all ranks: {found}")
        if not (found := ranks.first_problem(reason)):
            assert state is not None
            state.passed_over = passed_over
            rank_state.put_own(state, state.ranks, ranks.rank)
            if ranks.saves:
                _mark(save_dir, passed_over)
            return state
        log.warning("ciuic: %s is passed over: %s", id_, found)
        passed_over.append(PassedOver(id_, found))
    if passed_over:
        raise NothingGood(passed_over)
    return None


def _candidates(
    ranks: Ranks, save_dir: Path, root: bytes, find: Callable[[], State | None] | None
) -> list[str]:
    """As rank 0 lists them, newest first; or the one that it finds."""
    found: tuple[list[str], str] = [], ""
    if ranks.saves:
        try:
            if find is not None:
                state = find()
                found = [] if state is None else [state.id], ""
            else:
                with Repository.open(save_dir) as repository:
                    found = [info.id for info in repository.snapshots.list(root=root)], ""
        except (CiuicError, ValueError, OSError) as error:
            found = [], str(error)
    ids, problem = ranks.tell(found)
    if problem:
        raise Damaged(f"no snapshot can be read by all ranks: {problem}")
    return list(ids)


def _mark(save_dir: Path, damaged: list[PassedOver]) -> None:
    if damaged:
        with quietly("what is damaged could not be marked, so that it may be shared by later snapshots"):
            marks.mark_damage(save_dir, [one.id for one in damaged])


def check_complete(state: State, objects: Mapping[str, Any]) -> None:
    """KeyError unless there is a state for each."""
    lacking = [name for name in objects if f"{name}_state_dict" not in state]
    if lacking:
        raise KeyError(
            f"{state.id} has no {', '.join(lacking)}: it was saved before that was registered; register what it has ({', '.join(state.facts.objects)}), "
            "or give another save_dir or name"
        )


def put_back(state: State, objects: Mapping[str, Any], ranks: Ranks | None) -> None:
    """Into the objects, in place, and into the generators; what cannot be exact is logged."""
    for name, value in objects.items():
        if (note := _of_another_kind(value, state[f"{name}_state_dict"], name)) is not None:
            log.warning("ciuic: not resumed exactly: %s", note)
        _load_into(value, state[f"{name}_state_dict"], name, state.id)
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    rank_state.load_buffers(objects, state.ranks, rank)
    if world_size != state.facts.world_size:
        log.warning(
            "ciuic: not resumed exactly: saved by %d ranks, and now there are %d",
            state.facts.world_size,
            world_size,
        )
    if rank_state.is_new(state.ranks, rank):
        return  # no two ranks are to draw the same
    for problem in randomness.restore(state["random_state"]):
        log.warning("ciuic: not resumed exactly: %s", problem)


def _load_into(value: Any, saved: Any, name: str, id_: str) -> None:
    """ValueError where it does not fit, with what the object says."""
    try:
        load_into(value, saved, name)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} does not take what {id_} has for it: is it the same as when that was saved? {type(error).__name__}: {error}"
        ) from error


def _of_another_kind(value: Any, saved: Any, name: str) -> str | None:
    """torch loads the state of any optimizer into any other that has as many parameters."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    defaults = getattr(value, "defaults", None)
    if not groups or not isinstance(defaults, dict):
        return None
    had, has = set(groups[0]), set(defaults)
    foreign = sorted(had - has - {"params", "param_names", "initial_lr"})
    lacking = sorted(has - had)
    if not foreign or not lacking:
        return None
    return f"{name} is a {type(value).__qualname__}, with {', '.join(lacking)}; what was saved has {', '.join(foreign)}: it was of another kind"
