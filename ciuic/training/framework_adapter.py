"""`FrameworkAdapter`: the calls by which an integration saves and resumes the states that a framework keeps.

For authors of integrations; a loop of one's own needs `SnapshotManager` alone. docs/integrations.md (Other
frameworks) has the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ciuic.training.coordinator import SaveCoordinator
from ciuic.training.results import Resumed, Save, State
from ciuic.training.snapshot_taker import GatheredStates, SnapshotSpec

_REASON = "asked for"


class FrameworkAdapter:
    """Hooks of one manager for a framework that runs the loop itself: `SnapshotManager.framework`.

    Where the framework says when a step is over, and puts states back in its own way::

        framework = manager.framework
        framework.join_ranks()                         # every rank, once torch.distributed is initialized
        framework.set_objects({"model": model, "progress": progress}, with_position=True)
        state = framework.load_state()                 # every rank; None: the run begins
        if state is not None:
            ...                                        # the framework restores state["model_state_dict"], …
            framework.continue_from(state)             # or framework.restore(state), which does both
        for each step:
            manager.step = number_of_steps
            manager.boundary()                         # saves if a rule says so; or manager.save_snapshot()
        manager.wait()                                 # all of it is durable

    A state has the keys of `SnapshotManager.load_latest_snapshot`: what ``state_dict()`` of the object registered
    as NAME returned, under ``NAME_state_dict``, with tensors on the CPU, and ``epoch``, ``step``, ``metrics``,
    ``random_state`` (for ciuic.training.state.stateful.restore) beside it.

    *Collective* methods are called by every rank of `torch.distributed`, in the same order; with one process they
    communicate with nobody. All are called by the thread that trains.
    """

    def __init__(
        self, coordinator: SaveCoordinator, take_over: Callable[[], None], await_saves: Callable[[], None]
    ) -> None:
        """Serve one manager.

        Args:
            coordinator: Parts of the manager.
            take_over: Makes the manager the one of this process that saves its training, or raises ValueError.
            await_saves: Waits until what this process has saved can be loaded.
        """
        self._coordinator = coordinator
        self._take_over = take_over
        self._await_saves = await_saves

    def join_ranks(self, *, prepare: bool = True) -> None:
        """Meet the other ranks, if torch.distributed was initialized after the manager was made. Collective.

        Without effect where that has happened, where there is one process, and with ``ManagerOptions(distributed=False)``.

        Args:
            prepare: False where asking the objects for their states is itself collective, so that the first
                arena must not be prepared at a boundary.
        """
        self._coordinator.join_ranks(prepare=prepare)

    def set_objects(self, objects: Mapping[str, Any], *, with_position: bool = False) -> None:
        """Save these objects from now on, in place of those of an earlier call; none of them is watched or wrapped.

        Unlike `SnapshotManager.register`: steps are not counted and boundaries not found by hooks, so that the
        integration sets ``manager.step`` and calls ``manager.boundary()``.

        Args:
            objects: Objects with ``state_dict()``, or Keras models and optimizers, by name; the state of NAME
                is ``state["NAME_state_dict"]``. Asked for their state at each save, not now.
            with_position: Whether the state of one of them has the position in the data. False: a resume is
                logged as not exact in this.

        Raises:
            TypeError: An object has no state.
        """
        self._coordinator.registered.take(objects, with_position=with_position)

    def load_state(self, find: Callable[[], State | None] | None = None) -> State | None:
        """Return the state to resume from, the same snapshot on every rank; changes nothing. Collective.

        Waits until the saves of this process are durable. Each rank gets what was its own, and of a sharded
        tensor its part.

        Args:
            find: Called on rank 0 to find the state, in the local directory; what it raises is raised on every
                rank. None: the newest whole one, wherever it is.

        Returns:
            The state; None if there is no snapshot, or ``find`` returned None.

        Raises:
            NoUsableSnapshot: There are snapshots, and none is whole (a `Damaged`).
            CiuicError: The local directory has none, and a remote cannot be read.
        """
        self._await_saves()
        return self._coordinator.load_to_resume(find)

    @property
    def shares_directory(self) -> bool:
        """True if all ranks save in one directory."""
        ranks = self._coordinator.taker.ranks
        return ranks is None or len(ranks.directories.groups) == 1

    def restore(self, state: State) -> Resumed:
        """Put a state of `load_state` into the objects and the random generators, in place, and continue from it.

        Returns:
            Where the run continues.

        Raises:
            KeyError: An object is not in the snapshot; nothing has been changed.
            ValueError: A state does not fit its object; nothing has been changed.
        """
        return self._coordinator.restore(state)

    def continue_from(self, state: State) -> None:
        """Continue step count, epoch, rules and run id from a state that the framework has restored itself.

        Neither objects nor random generators are touched.
        """
        self._coordinator.resume_from(state)

    def gather_states(self) -> GatheredStates:
        """Collect each rank's own part of the state, for a framework that calls its checkpoint's save on rank 0 alone.

        Called on every rank before that. Collective. Nothing is durable on return.

        Returns:
            On rank 0 what `save_gathered` takes; of no use on others.

        Raises:
            ValueError: The manager is closed.
        """
        self._take_over()
        taker = self._coordinator.taker
        parts = taker.gather_parts(may_wait=True)
        if not taker.writes:
            taker.take(SnapshotSpec(_REASON), parts)
        return parts

    def evaluates(self) -> None:
        """Tell that the training lives, for each batch of an evaluation, in which there are no steps (0.2 µs)."""
        self._coordinator.heartbeat.evaluates(self._coordinator.run.step)

    def save_gathered(
        self,
        states: GatheredStates,
        *,
        epoch: int | None = None,
        step: int | None = None,
        tags: tuple[str, ...] = (),
        hold: str = "",
    ) -> Save | None:
        """Save on rank 0 alone; return when the state is copied, as `SnapshotManager.save_snapshot` does.

        The snapshot is durable when ``wait()`` of the returned save has returned its id.

        Args:
            states: What `gather_states` returned on rank 0; None: nothing of the other ranks.
            epoch: Epoch to record; None: the last one that was given.
            step: Optimizer steps of the run; None: as the manager counts.
            tags: Tags of the snapshot.
            hold: Reason to keep the snapshot until `SnapshotManager.release`; empty: it is not held.

        Returns:
            The save; None if the state could not be copied, which is logged.

        Raises:
            TypeError: A value cannot be stored; the message names it.
            ValueError: The manager is closed.
        """
        self._take_over()
        run = self._coordinator.run
        run.epoch = run.epoch if epoch is None else epoch
        run.step = run.step if step is None else step
        request = SnapshotSpec(_REASON, epoch, tags=tags, hold=hold, may_wait=True)
        return self._coordinator.taker.take(request, states)
