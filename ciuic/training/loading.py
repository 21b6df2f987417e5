"""Loading of the newest whole state, from the local directory or a remote, on one rank or on all, into registered objects.

Guarantees: damaged snapshots are passed over, and their content is marked so that later snapshots store it
anew. Several ranks get the same snapshot, or all get the same error. No object is changed before the whole
state was read and found complete.

Of the snapshots of the training that are whole, the newest is loaded, wherever it is; a remote is read
only for one that the local directory lacks. Where the local directory has none, a remote that cannot be reached
is an error: a run never begins anew because a remote did not answer. Where it has some, that is a warning.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ciuic.errors import CiuicError, Damaged, NotFound, UsageError
from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable
from ciuic.repository import Repository
from ciuic.training.format.reading import (
    Facts,
    Loaded,
    NoUsableSnapshot,
    PassedOver,
    SavedSnapshot,
    check_unreadable,
    load,
    load_from,
    newest_good,
    read_facts,
    saved_snapshots,
)
from ciuic.training.format.shards import TemplateLookup
from ciuic.training.loading_sets import are_in_parts, load_newest_whole, whole_state
from ciuic.training.logs import log, quietly
from ciuic.training.ranks import Ranks
from ciuic.training.remote.copies import RemoteCandidate, RemoteTraining
from ciuic.training.remote.place import RemoteList
from ciuic.training.results import State
from ciuic.training.state import rank_state, stateful
from ciuic.training.state.stateful import load_into
from ciuic.training.writer import marks
from ciuic.types import SnapshotId
from ciuic.units import plural

Templates = Mapping[str, TemplateLookup]


def load_newest(
    save_dir: Path,
    root: bytes,
    templates: Templates | None = None,
    *,
    ranks: Ranks | None = None,
    remotes: RemoteList = (),
    find: Callable[[], State | None] | None = None,
) -> State | None:
    """Return the newest state that is whole; None if there is no snapshot. Collective where there are ranks.

    Args:
        save_dir: Local repository.
        root: Path of the training in its snapshots.
        templates: Templates of the objects of which this rank has a part.
        ranks: The ranks, all of which get the same snapshot.
        remotes: Remotes that may have newer ones.
        find: Called on rank 0 to find the state instead, in the local repository alone.

    Raises:
        NoUsableSnapshot: There are snapshots, and none is whole.
        CiuicError: A remote cannot be reached or opened.
    """

    def load_local() -> State | None:
        if ranks is not None:
            return _load_on_all_ranks(ranks, save_dir, root, templates or {}, find)
        return find() if find is not None else load_latest(save_dir, root, templates)

    if find is not None:
        if ranks is not None and len(ranks.directories.groups) > 1:
            raise UsageError("a snapshot can be chosen only where all ranks save in one directory")
        return load_local()
    with RemoteTraining(remotes, root) as training:
        if are_in_parts(save_dir, root, training, ranks):
            return load_newest_whole(save_dir, root, templates, ranks=ranks, training=training)
        if not remotes:
            return load_local()
        loading = _RemoteLoading(training, templates, ranks)
        # First those that this host does not have: it may have come back with what it had days ago.
        newer = loading.candidates(lambda: _newer_than_local(training, save_dir, root))
        damage: NoUsableSnapshot | None = None
        try:
            if newer:
                return loading.first_good(newer)
        except NoUsableSnapshot as error:
            damage = error
        try:
            state = load_local()
        except NoUsableSnapshot as error:
            others = loading.candidates(lambda: [one for one in training.candidates() if one not in newer])
            if not others:
                raise
            log.warning("ciuic: no snapshot here is whole, so that a remote is read: %s", error.message)
            return loading.first_good(others)
        if state is None and damage is not None:
            raise damage
        return state


def _newer_than_local(training: RemoteTraining, save_dir: Path, root: bytes) -> list[RemoteCandidate]:
    """Return the snapshots on remotes that are newer than every one here.

    Raises:
        CiuicError: There is none here, and a remote cannot be read.
    """
    with Repository.open(save_dir) as repository:
        here = repository.snapshots.list(root=root)
    try:
        found = training.candidates()
    except CiuicError as error:
        if not here:
            raise
        # Without the network a run must go on where it can; the error is an error only where nothing is here.
        log.warning("ciuic: resuming from this directory without looking at the remote: %s", error.message)
        return []
    return [one for one in found if not here or one.time_ns > here[0].time_ns]


class _RemoteLoading:
    """Loading from remotes, on one rank or on all; every method is collective where there are several."""

    def __init__(self, training: RemoteTraining, templates: Templates | None, ranks: Ranks | None) -> None:
        self._training = training
        self._templates = templates
        self._ranks = ranks

    def candidates(self, find: Callable[[], Sequence[RemoteCandidate]]) -> list[RemoteCandidate]:
        """Return what rank 0 finds."""
        if self._ranks is None:
            return list(find())
        return [
            RemoteCandidate(*one)
            for one in _told_by_rank_0(self._ranks, lambda: [tuple(one) for one in find()])
        ]

    def first_good(self, candidates: Sequence[RemoteCandidate]) -> State | None:
        """Return the first that is whole. NoUsableSnapshot if none is."""
        if self._ranks is not None:
            return _first_on_all_ranks(self._ranks, candidates, self._load)
        passed_over: list[PassedOver] = []
        for candidate in candidates:
            try:
                loaded = self._load(*candidate)
            # They say nothing about the snapshot, so no older one may be taken for the newest.
            except (RemoteUnreachable, RemoteRefused):
                raise
            except (CiuicError, ValueError) as error:
                log.warning("ciuic: snapshot %s is passed over: %s", candidate.id, error)
                passed_over.append(PassedOver(candidate.id, str(error)))
                continue
            loaded.passed_over = passed_over
            return State(loaded)
        raise NoUsableSnapshot(passed_over)

    def _load(self, *candidate: Any) -> Loaded:
        found = RemoteCandidate(*candidate)
        loaded = load(self._training.opener(found), found.id, self._templates)
        log.info("ciuic: loaded %s from remote %s", found.id, found.remote)
        return loaded


# Attempts while a training that saves meanwhile removes snapshots that are being read.
_TRIES: Final = 5


def load_latest(
    save_dir: Path,
    root: bytes,
    templates: Templates | None = None,
    wanted: Callable[[Facts], bool] | None = None,
) -> State | None:
    """Return the newest state that is whole; None if there is no snapshot.

    Args:
        save_dir: Repository.
        root: Path of the training in its snapshots.
        templates: Templates of the objects of which this rank has a part; without them all tensors are whole.
        wanted: Tells which snapshots count; one whose facts cannot be read does not, which is logged. None: all.

    Raises:
        NoUsableSnapshot: There are snapshots, and none is whole.
    """
    loaded = None
    # Without another attempt a snapshot that a running training removes while it is read would be taken for
    # damaged.
    for more in reversed(range(_TRIES)):
        with Repository.open(save_dir) as repository:
            candidates = repository.snapshots.list(root=root)
            if not candidates:
                check_unreadable(repository.snapshots)
            if wanted is not None:
                candidates = [one for one in candidates if _is_wanted(repository, one.id, wanted)]
        try:
            loaded = newest_good(str(save_dir), candidates, templates)
        except NoUsableSnapshot as error:
            if more and _any_removed(save_dir, error.passed_over):
                continue
            _mark_damaged(save_dir, error.passed_over)
            raise
        # Also where an older one was good: if one that was passed over has been removed since, there are
        # newer ones than the candidates.
        if loaded is None or not (more and _any_removed(save_dir, loaded.passed_over)):
            break
    if loaded is None:
        return None
    for id_, reason in loaded.passed_over:
        log.warning("ciuic: snapshot %s is passed over: %s", id_, reason)
    state = State(loaded)
    _tell_cost(save_dir, state)
    _mark_damaged(save_dir, loaded.passed_over)
    return state


def _is_wanted(repository: Repository, id_: str, wanted: Callable[[Facts], bool]) -> bool:
    try:
        return wanted(read_facts(repository, SnapshotId(id_)))
    except NotFound:
        return False  # removed meanwhile
    except (CiuicError, ValueError) as error:
        log.warning("ciuic: snapshot %s is passed over: %s", id_, error)
        return False


_STEP: Final = re.compile(r"(?:^|, )step ([0-9]{1,18})(?:,|$)")


def _tell_cost(save_dir: Path, state: State) -> None:
    """Log how many steps are lost with the snapshots that were passed over for an older one."""
    if not state.passed_over:
        return
    newest = _step_of(save_dir, state.passed_over[0].id)
    here = state.facts.step
    if newest is None or here is None:
        cost = "how many steps that costs is not known"
    else:
        cost = f"{plural(max(0, newest - here), 'step')} after step {here} must be done again"
    log.warning("ciuic: snapshot %s is loaded instead of %s: %s", state.id, state.passed_over[0].id, cost)


def _step_of(save_dir: Path, id_: str) -> int | None:
    """Return the step of a snapshot that is damaged: from its facts or, where these are damaged, from its message."""
    try:
        with Repository.open(save_dir) as repository:
            try:
                return read_facts(repository, SnapshotId(id_)).step
            except (CiuicError, ValueError):
                # Written by `facts_summary`.
                found = _STEP.search(repository.snapshots.info(SnapshotId(id_)).message)
    except (CiuicError, OSError):
        return None
    return int(found[1]) if found else None


def list_snapshots(save_dir: Path, root: bytes) -> list[SavedSnapshot]:
    """Return the snapshots of one training, newest first; those that cannot be read are left out."""
    with Repository.open(save_dir) as repository:
        return saved_snapshots(repository, root)


def _any_removed(save_dir: Path, passed_over: Iterable[PassedOver]) -> bool:
    """Return whether a training that saves meanwhile has removed one of them: then there are newer ones."""
    with Repository.open(save_dir) as repository:
        return not repository.snapshots.names().issuperset(one.id for one in passed_over)


def load_one(save_dir: Path, find: Callable[[Repository], SnapshotId]) -> State:
    """Load the snapshot that ``find`` chooses in the opened repository.

    Raises:
        NotFound: There is no such snapshot.
        Damaged: Something is not as it was saved.
        ValueError: This version of ciuic or of the framework does not know what was saved.
    """
    with Repository.open(save_dir) as repository:
        id_ = find(repository)
    return State(load_from(whole_state([str(save_dir)], id_), id_))


def load_by_name(save_dir: Path, snapshot: str) -> State:
    """Load the snapshot with this id, prefix of an id, or name such as ``latest~2``; raises as `load_one`."""
    return load_one(save_dir, lambda repository: repository.snapshots.resolve(snapshot))


def _load_on_all_ranks(
    ranks: Ranks,
    save_dir: Path,
    root: bytes,
    templates: Templates,
    find: Callable[[], State | None] | None = None,
) -> State | None:
    """Load the newest snapshot that every rank can read. Collective: what fails on one rank is raised on all.

    Args:
        ranks: The ranks.
        save_dir: Repository.
        root: Path of the training in its snapshots.
        templates: Templates of the objects of which this rank has a part.
        find: Called on rank 0 to choose the snapshot instead.

    Returns:
        The state with what was this rank's own; None if there is no snapshot.

    Raises:
        NoUsableSnapshot: There are snapshots, and none can be read by all ranks.
        Damaged: A rank cannot read the repository at all.
    """

    def ids() -> list[str]:
        if find is not None:
            state = find()
            return [] if state is None else [state.id]
        with Repository.open(save_dir) as repository:
            if not (found := repository.snapshots.list(root=root)):
                check_unreadable(repository.snapshots)
            return [info.id for info in found]

    try:
        state = _first_on_all_ranks(
            ranks,
            _told_by_rank_0(ranks, lambda: [(id_,) for id_ in ids()]),
            lambda id_: load(str(save_dir), id_, templates),
        )
    except NoUsableSnapshot as error:
        if ranks.saves:
            _mark_damaged(save_dir, error.passed_over)
        raise
    if state is not None and ranks.saves:
        _tell_cost(save_dir, state)
        _mark_damaged(save_dir, state.passed_over)
    return state


def _first_on_all_ranks(
    ranks: Ranks, candidates: Iterable[tuple[Any, ...]], load_candidate: Callable[..., Loaded]
) -> State | None:
    """Load the first candidate that every rank can read. Collective.

    Args:
        ranks: The ranks.
        candidates: The same on all ranks, newest first; the last item of each is its id.
        load_candidate: Called with the items of a candidate.

    Returns:
        The state with what was this rank's own; None if there are no candidates.

    Raises:
        NoUsableSnapshot: None can be read by all ranks.
        Damaged: A rank cannot reach what holds them.
    """
    passed_over: list[PassedOver] = []
    for candidate in candidates:
        state, reason, problem, id_ = None, "", "", str(candidate[-1])
        try:
            state = State(load_candidate(*candidate))
        # These say nothing about the snapshot, so no older one may be taken for it.
        except (OSError, RemoteUnreachable, RemoteRefused) as error:
            problem = str(error)
        except (CiuicError, ValueError) as error:
            reason = str(error)
        # Both exchanges are collective: every rank makes them in this order, whatever happened to it.
        if found := ranks.first_problem(problem):
            raise Damaged(f"{id_} cannot be read by all ranks: {found}")
        if not (found := ranks.first_problem(reason)):
            assert state is not None
            state.passed_over = passed_over
            rank_state.apply_own_state(state, state.ranks, ranks.rank)
            return state
        log.warning("ciuic: snapshot %s is passed over: %s", id_, found)
        passed_over.append(PassedOver(id_, found))
    if passed_over:
        raise NoUsableSnapshot(passed_over)
    return None


def _told_by_rank_0(ranks: Ranks, find: Callable[[], Sequence[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Return on every rank the candidates that rank 0 finds. Collective.

    Raises:
        Damaged: Rank 0 finds none because of an error.
    """
    found: tuple[list[tuple[Any, ...]], str] = [], ""
    if ranks.saves:
        try:
            found = list(find()), ""
        # Sent instead of raised: the other ranks wait for what rank 0 tells.
        except (CiuicError, ValueError, OSError) as error:
            found = [], str(error)
    candidates, problem = ranks.tell(found)
    if problem:
        raise Damaged(f"no snapshot can be read by all ranks: {problem}")
    return [tuple(one) for one in candidates]


def _mark_damaged(save_dir: Path, damaged: list[PassedOver]) -> None:
    # Content that is marked is stored anew when it comes again; otherwise later snapshots would share what is
    # damaged.
    if damaged:
        with quietly("what is damaged could not be marked, so that it may be shared by later snapshots"):
            marks.mark_damage(save_dir, [one.id for one in damaged])


def check_fits(state: State, objects: Mapping[str, Any], ranks: Ranks | None) -> None:
    """Check that every registered object can be restored, before any is changed. Collective.

    Raises:
        KeyError: A registered object is not in the snapshot.
        ValueError: The state of an object does not fit it; the message names what differs.
    """
    lacking = [name for name in objects if f"{name}_state_dict" not in state]
    problem = ""
    if lacking:
        problem = (
            f"snapshot {state.id} has no {', '.join(lacking)}, only {', '.join(state.facts.objects)}: "
            "register what it has, or pass another save_dir or name"
        )
    else:
        # Models first: where one differs, its optimizer differs for that reason.
        names = sorted(objects, key=lambda name: not hasattr(objects[name], "forward"))
        problem = next((text for name in names if (text := _misfit(state, name, objects[name]))), "")
    # Exchanged by all ranks, so that none restores its objects while another raises.
    shared = problem if ranks is None else ranks.first_problem(problem)
    if lacking:
        raise KeyError(problem)
    if shared:
        raise ValueError(problem or shared)


def _misfit(state: State, name: str, value: Any) -> str:
    saved = state[f"{name}_state_dict"] = stateful.renamed_as(value, state[f"{name}_state_dict"])
    problem = stateful.problem_of(value, saved) or _another_kind(value, saved)
    return (
        problem and f"{name} cannot load its state from snapshot {state.id}; nothing was changed: {problem}"
    )


def put_back(state: State, objects: Mapping[str, Any], ranks: Ranks | None) -> None:
    """Restore the objects in place, and the random generators; log what cannot be exact.

    Where an object cannot load its state, all are what they were before.

    Raises:
        ValueError: An object cannot load its state.
    """
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    undo = stateful.Undo()
    try:
        for name, value in objects.items():
            undo.remember(name, value)
        # Those that may raise come first: the others were checked, and could not be undone.
        for name in sorted(objects, key=lambda name: stateful.is_checked_wholly(objects[name])):
            _load_into(objects[name], state[f"{name}_state_dict"], name, state.id)
        _put_dtypes_back(state, objects)
    except BaseException:
        undo.restore()
        raise
    # After the objects: what they have just loaded are rank 0's buffers.
    rank_state.load_buffers(objects, state.ranks, rank)
    if world_size != state.facts.world_size:
        log.warning(
            "ciuic: not resumed exactly: saved by %d ranks, and now there are %d",
            state.facts.world_size,
            world_size,
        )
    if rank_state.is_new(state.ranks, rank):
        return  # Rank 0's random state on a new rank would make two ranks draw the same numbers.
    for problem in stateful.restore_random_states(state["random_state"]):
        log.warning("ciuic: not resumed exactly: %s", problem)


def _put_dtypes_back(state: State, objects: Mapping[str, Any]) -> None:
    """Give the states of optimizers the dtypes that they were saved with.

    torch.optim.Optimizer.load_state_dict casts every tensor of a parameter's state to the parameter's dtype: float32 masters of
    bfloat16 weights are rounded, and integers become floats. A model that has another dtype now is refused before.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return

    plain = (torch.Tensor, torch.nn.Parameter)

    def as_saved(loaded: Any, saved: Any) -> Any:
        if (
            type(loaded) in plain
            and type(saved) in plain
            and (loaded.dtype, type(loaded)) != (saved.dtype, type(saved))
        ):
            made = saved.detach().clone().to(loaded.device)
            is_parameter = type(saved) is torch.nn.Parameter
            return torch.nn.Parameter(made, saved.requires_grad) if is_parameter else made
        if isinstance(loaded, dict) and isinstance(saved, dict):
            return {key: as_saved(one, saved.get(key)) for key, one in loaded.items()}
        if type(loaded) in (list, tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
            return type(loaded)(map(as_saved, loaded, saved))
        return loaded

    for name, optimizer in objects.items():
        saved = state[f"{name}_state_dict"]
        if (
            not isinstance(optimizer, torch.optim.Optimizer)
            or not isinstance(saved, dict)
            or "state" not in saved
        ):
            continue
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=False):
            if parameter in optimizer.state:
                optimizer.state[parameter] = as_saved(optimizer.state[parameter], saved["state"].get(key))


def _load_into(value: Any, saved: Any, name: str, id_: str) -> None:
    """Restore one object; raise ValueError with the object's own message if the state does not fit."""
    try:
        load_into(value, saved, name)
    # What frameworks raise for a state that does not fit.
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} cannot load its state from snapshot {id_}, which needs the same kind of object with the same shapes; "
            f"nothing was changed: {type(error).__name__}: {error}"
        ) from error


def _another_kind(value: Any, saved: Any) -> str:
    """Return what is wrong if an optimizer's state was saved by another kind of optimizer, otherwise "".

    PyTorch itself loads the state of any optimizer into any other with as many parameters.
    """
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    defaults = getattr(value, "defaults", None)
    if not groups or not isinstance(defaults, dict):
        return ""
    # Optimizers of one kind have the same hyperparameters. Only where each side has some that the other lacks
    # is the kind different for sure: versions of one optimizer add some, and schedulers add initial_lr.
    had, has = set(groups[0]), set(defaults)
    foreign = sorted(had - has - {"params", "param_names", "initial_lr"})
    lacking = sorted(has - had)
    if not foreign or not lacking:
        return ""
    return (
        f"it is a {type(value).__qualname__} with {', '.join(lacking)}, but another kind of optimizer was saved, "
        f"with {', '.join(foreign)}"
    )
