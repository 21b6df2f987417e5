"""`SnapshotManager`: saves the state of a training without a stall and resumes it exactly.

Guarantees: a save costs the training one copy of its state in memory; the writer process does the rest, and
finishes what it was given even when the training is killed. A snapshot exists whole or not at all, and what
is loaded was checked byte for byte. Failures of saving are logged and counted and never raised into the
training, except for mistakes of the program itself (an object without a state, a value that cannot be
stored), which `save_snapshot` raises, and after automatic saves the next `wait`. One thread at a time; one process
of a run saves.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from ciuic.training import arguments
from ciuic.training.arguments import ManagerOptions, OldKeywords, options_of, warn_deprecated
from ciuic.training.coordinator import SaveCoordinator, Settings
from ciuic.training.framework_adapter import FrameworkAdapter
from ciuic.training.logs import log, warn_once
from ciuic.training.remote.place import Remotes, place_of
from ciuic.training.results import EXIT_SECONDS, Resumed, Save, SaveCallback, State, Stats
from ciuic.training.rules import Best, Keep, Latest, Rule, SaveRules, rules_of
from ciuic.training.save_schedule import Forecast
from ciuic.training.snapshot_taker import explicit_request
from ciuic.training.snapshots import TrainingSnapshots
from ciuic.training.trackers import Tracker
from ciuic.training.writer.paired_files import Roots

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PENDING_GRADIENTS: Final = (
    "a resume would not be exact: save_snapshot was called between backward() and optimizer.step(), and a snapshot has no "
    "gradients: those that were accumulated since the last step are lost; save after a step"
)
_MOVED_TO_FRAMEWORK: Final = {
    "take": "set_objects",
    "load_to_resume": "load_state",
    "put_back": "restore",
    "goes_on_from": "continue_from",
    "hand_over": "gather_states",
    "save_handed": "save_gathered",
    "join_ranks": "join_ranks",
}
"""Old names of what is the `FrameworkAdapter`'s now."""
_managers: weakref.WeakSet[SnapshotManager] = weakref.WeakSet()
"""Managers of this process that are not closed."""


def _call_site_of(frame: FrameType) -> str:
    """Return file name and line of a call, which tell the calls of save_snapshot apart on all ranks."""
    # By the place in the program, because each call may be reached on rank 0 alone: a plain count of calls
    # would pair one that rank 0 makes alone with the next call that all ranks make.
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class SnapshotManager(TrainingSnapshots):
    """Save the state of a training without stopping it, and resume it exactly.

        manager = SnapshotManager("./snapshots", max_snapshots=10)
        manager.save_snapshot(model, optimizer, epoch)
        state = manager.load_latest_snapshot()              # None: there is no snapshot
        model.load_state_dict(state["model_state_dict"])

    Automatically, with everything that an exact resume needs:

        manager = SnapshotManager("./snapshots", every_steps=500, max_snapshots=10)
        manager.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        resumed = manager.resume()                          # None: the run begins

    The guarantees are in docs/snapshot-manager.md. The attribute `framework` is for authors of integrations
    (docs/integrations.md, Other frameworks).

    Args:
        save_dir: Directory of the repository; or the URL of a remote, with a local directory below
            ``$XDG_STATE_HOME/ciuic/trainings``, which the attribute ``save_dir`` then names.
        interval: Time between two automatic snapshots: seconds, or text such as ``1h``.
        max_snapshots: Number of newest snapshots to keep. Without it and without ``keep`` all are kept.
        every_steps: Number of optimizer steps between two automatic snapshots.
        save_when: Further rules that make a snapshot due: ciuic.training.Steps, AfterIf, OnImprovement,
            Automatic, BeforePreemption, and subclasses of Rule.
        keep: Further rules that keep snapshots: EverySteps, EverySeconds, Best, Held.
        name: Name of the run, for several runs in one repository.
        compression: ``auto`` leaves the newest state as it is and encodes the one before it while processors
            are idle; ``small`` encodes each state when it is saved; ``none`` compresses nothing.
        filesystem: Directories of which a daemon takes a snapshot at the same instant, with every
            snapshot; True: all protected directories of this user.
        remote: Remotes to which each snapshot is uploaded: a URL, a mapping with the keys of ``[remote]``
            (``url``, ``endpoint``, ``key_file``, …), several, or True for those of this machine's configuration.
            None: none, also where that configuration has some.
        options: What few programs have to say: niceness, ranks, heartbeats, copies beside steps.
        **old: Fields of `ManagerOptions`, which were arguments before, with a DeprecationWarning.

    Raises:
        ValueError: An option is out of its range.
        TypeError: An option has the wrong type, or there is none of that name.
        CiuicError: There can be no repository in ``save_dir``.
        OSError: The same, as the file system says it.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "./snapshots",
        interval: float | str | None = None,
        max_snapshots: int | None = None,
        *,
        every_steps: int | None = None,
        save_when: Iterable[Rule] | Rule = (),
        keep: Iterable[Keep] | Keep = (),
        name: str = "training",
        compression: str = "auto",
        filesystem: Roots = False,
        remote: Remotes = None,
        options: ManagerOptions | None = None,
        **old: Unpack[OldKeywords],
    ) -> None:
        """Open the repository at ``save_dir``, or create one there, parents included."""
        others = options_of(options, dict(old))
        place = place_of(save_dir, remote)
        super().__init__(place.directory, name)
        rules = rules_of(interval, every_steps, arguments.several(save_when, "save_when"))
        latest = [] if max_snapshots is None else [Latest(arguments.count(max_snapshots, "max_snapshots"))]
        settings = Settings(
            save_dir=self.save_dir,
            name=name,
            rules=SaveRules(rules),
            keeps=(*latest, *arguments.several(keep, "keep")),
            compression=compression,
            options=others,
            filesystem=filesystem,
            remotes=place.remotes,
        )
        self._best_rules = tuple(rule for rule in settings.keeps if isinstance(rule, Best))
        self._coordinator = SaveCoordinator(settings)
        self._copies = self._coordinator.pipeline.copies
        self.stats: Stats = self._coordinator.pipeline.stats
        self.framework = FrameworkAdapter(self._coordinator, self._take_over, self._await_saves)
        self._place = (os.path.realpath(self.save_dir), name)
        self._saves = False
        """This is the manager of this process that saves the training."""
        self._closed_because = "the manager is closed"
        _managers.add(self)
        # A script that ends without `close` still waits for its last saves, and says goodbye to the daemon.
        atexit.register(self.close)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute by its old name, or raise AttributeError, of a manager out of a pickle with what to do."""
        if (new := _MOVED_TO_FRAMEWORK.get(name)) is not None and not self._is_reader:
            warn_deprecated(f"SnapshotManager.{name}", f"SnapshotManager.framework.{new}")
            return getattr(self.framework, new)
        reason = f"{type(self).__name__!r} object has no attribute {name!r}"
        # The attributes of the constructor, and so each property and method that uses them.
        if self._is_reader:
            reason += (
                f", because it comes out of a pickle: it lists and loads the snapshots in {self.__dict__.get('save_dir')}; "
                "create a SnapshotManager there to save"
            )
        raise AttributeError(reason, name=name, obj=self)

    @property
    def _is_reader(self) -> bool:
        """True if this comes out of a pickle."""
        return "_coordinator" not in self.__dict__

    @property
    def step(self) -> int:
        """Optimizer steps of the run, restarts included; the program counts if optimizers have no hooks."""
        return self._coordinator.run.step

    @step.setter
    def step(self, step: int) -> None:
        self._coordinator.set_step(arguments.whole_number(step, "step"))

    @property
    def epoch(self) -> int | None:
        """Epoch that the program gave last."""
        return self._coordinator.run.epoch

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._coordinator.run.epoch = None if epoch is None else arguments.whole_number(epoch, "epoch")

    @property
    def forecast(self) -> Forecast | None:
        """Expected size and duration of a snapshot, and what will not fit; None before the first step."""
        return self._coordinator.forecast

    # -- saving

    def register(self, **objects: Any) -> None:
        """Register objects by name: each is saved with every snapshot and put back by `resume`.

        Nothing is saved yet. Besides models and optimizers: schedulers, scalers, averages of weights, samplers,
        loaders, generators, dicts, anything that has a state. ``loader`` is any data loader; the batches of one
        without a state_dict are counted from now on.

        Raises:
            TypeError: An object has no state.
            ValueError: A name cannot be used, or the manager is closed.
        """
        self._take_over()
        self._coordinator.register(objects)

    def save_snapshot(
        self,
        model: Any = None,
        optimizer: Any = None,
        epoch: int | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: str | tuple[str, ...] | list[str] = (),
        hold: str | bool = "",
        wait: bool = False,
        filesystem: Roots | None = None,
        **others: Any,
    ) -> Save | None:
        """Save now; return when the state is copied, or with ``wait`` when the snapshot is durable.

        Without ``wait`` the snapshot is durable when ``wait()`` of the returned save has returned its id: it exists
        whole by then, or not at all. Registered objects are saved too. While the writer still has all arenas
        this waits until one is free. With several ranks all should call it, and none waits for another except with ``wait``; called on rank
        0 alone it saves the state of rank 0.

        Args:
            model: Object, or what its state_dict() returned.
            optimizer: Object, or what its state_dict() returned.
            epoch: Epoch to record, a whole number.
            step: Optimizer steps of the run, restarts included, where the manager does not count them.
            metrics: Metrics of this state: numbers by name.
            tags: Tags of the snapshot, or a single one.
            hold: Reason to keep the snapshot until `release`, whatever the rules say; True: without a reason.
            wait: Whether to wait until the snapshot is durable, at most two minutes.
            filesystem: Directories to snapshot at the same instant, held if this snapshot is; None: as the
                manager was told.
            **others: Further objects, or plain values, which come back under their own names.

        Returns:
            The save, whose `error` says why it failed if it did; None on ranks other than 0, when the
            state could not be copied, which is logged, and when a signal handler calls this within the step of an
            optimizer: the snapshot is taken at the boundary of that step.

        Raises:
            TypeError: A value cannot be stored; the message names it.
            ValueError: The manager is closed, or there is nothing to save.
        """
        self._take_over()
        objects, wanted = explicit_request(
            model, optimizer, epoch, others, metrics or {}, tags, hold, filesystem
        )
        if not objects and not wanted.plain and not self._coordinator.registered.objects:
            raise ValueError("there is nothing to save: give save_snapshot a model, or register it")
        # Registered, so that later automatic snapshots have them too.
        self.register(**objects)
        self._coordinator.heartbeat.beat(self.step)
        self.epoch = self.epoch if wanted.epoch is None else wanted.epoch
        self.step = self.step if step is None else arguments.whole_number(step, "step")
        if self._coordinator.boundaries.gradients.are_pending():
            warn_once(_PENDING_GRADIENTS)
        save, place = None, _call_site_of(sys._getframe(1))
        taker = self._coordinator.taker
        stepping = self._coordinator.boundaries.optimizer_in_step()
        if stepping is not None and self._coordinator.boundaries.after_step(
            stepping, self._coordinator.take_deferred
        ):
            # Some parameters are those of this step, and others of the one before.
            log.warning(
                "ciuic: save_snapshot was called within optimizer.step(): it is taken when the step is over"
            )
            self._coordinator.deferred.append(lambda: taker.take(wanted, taker.parts_when_asked(place)))
            return None
        try:
            save = taker.take(wanted, taker.parts_when_asked(place))
        finally:
            # Also after an error: the other ranks wait for this one to say how it ended.
            if wait:
                taker.wait_durable(save, EXIT_SECONDS)
        return save

    def boundary(self) -> None:
        """Tell the manager that a step is over and the state is whole; takes a snapshot if one is due.

        For loops in which no registered object can tell, and for those that change what is registered after
        optimizer.step(). A program that calls this has no other boundary. Returns when the state is copied; nothing is
        durable yet.

        Raises:
            TypeError: The first snapshot cannot be taken, because the state has what cannot be stored (as `wait`).
        """
        self._coordinator.boundaries.explicit()
        # Later a run goes on without snapshots rather than end in the middle.
        if not (self.stats.saved or self._coordinator.pipeline.pending):
            self._coordinator.pipeline.raise_refusal()

    def consumed(self, batches: int = 1) -> None:
        """Tell that the program trains with so many more batches of the registered loader.

        For programs that fetch batches ahead (a prefetcher), in which the position of the loader is not that of the
        training: called for each batch that is taken from the prefetcher, before its step. From the first call on
        these batches alone count in a pass, and the passes must not overlap.
        """
        self._coordinator.boundaries.consumed(arguments.whole_number(batches, "batches"))

    def report(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Report metrics of the current state, for rules that look at them and for the next snapshot.

        A snapshot that is due because of them is taken at once where the state is whole, otherwise at the
        next boundary.

        Args:
            metrics: Numbers by name; tensors of one element and NumPy's numbers are numbers too.
            **more: The same.

        Raises:
            TypeError: A metric is no number.
        """
        self._coordinator.report(arguments.numbers({**(metrics or {}), **more}))

    def on_saved(self, callback: SaveCallback) -> SaveCallback:
        """Call a function with the `SaveResult` of each save: durable, or failed with the reason.

        Each save that ends from now on counts, automatic ones too, once; not one that was skipped because the
        writer was busy. The calls come one after another on one thread of the manager (``ciuic-on-saved``),
        beside the training, as soon as the manager has heard of the end: at the next boundary, save, `wait` or
        `close`. What a callback raises is logged. `close` waits for calls that are due, within its time, and
        none begins after it. Of several ranks rank 0, which writes, calls.

        Returns:
            The function, so that this can be a decorator.

        Raises:
            TypeError: It cannot be called.
            ValueError: The manager is closed.
        """
        if self._coordinator.closed:
            raise ValueError(self._closed_because)
        self._coordinator.callbacks.add(callback)
        return callback

    def track(self, tracker: Tracker) -> None:
        """Log the saves that begin from now on to a run of an experiment tracker.

        ``ciuic.integrations`` has them: ``mlflow.track(manager)``, ``wandb.track(manager)``,
        ``tensorboard.track(manager, writer)``; the callbacks for Lightning and the Trainer find theirs. Each
        snapshot stores to which runs it was logged. A thread of the tracker logs step, verdict and sizes when the
        save has ended; the training never waits for it, and `close` at most 5 seconds. Of several ranks rank 0 logs.

        Args:
            tracker: Takes the place of one of the same name.

        Raises:
            ValueError: The manager is closed.
        """
        if self._coordinator.closed:
            raise ValueError(self._closed_because)
        self._coordinator.track(tracker)

    # -- loading and resuming

    def load_latest_snapshot(self) -> State | None:
        """Return the newest state that is whole, here or on a remote; None if there is no snapshot.

        What `load_snapshot` returns when no snapshot is named. Waits until the saves of this process are durable, so
        that the newest is the last one that it took.

        Raises:
            NoUsableSnapshot: There are snapshots, and none is whole (a `Damaged`).
            CiuicError: The local directory has none, and a remote cannot be read.
        """
        if self._is_reader:
            return super().load_latest_snapshot()
        self._await_saves()
        return self._coordinator.load_latest()

    def resume(self, *, tracker_run: str | None = None) -> Resumed | None:
        """Put the newest good state into every registered object and into the random generators, in place.

        Objects in the snapshot that are not registered are left out. Every rank gets the same snapshot, and
        from it what was its own.

        Args:
            tracker_run: Id of a run of MLflow, Weights & Biases or another tracker: only snapshots that `track`
                logged to it, in the local directory alone. No tracker is asked.

        Returns:
            Where the run continues; None if there is no snapshot: the run begins.

        Raises:
            NoUsableSnapshot: There are snapshots, and none is whole (a `Damaged`).
            NotFound: None that was logged to ``tracker_run`` is left; the message names runs to which some were.
            CiuicError: The local directory has none, and a remote cannot be read.
            KeyError: A registered object is not in the snapshot; nothing has been changed.
            ValueError: The state of an object does not fit it: other names, shapes, dtypes or parameter
                groups, or a model on the meta device; nothing has been changed. Or the manager is closed.
        """
        self._take_over()
        find = None if tracker_run is None else lambda: self.load_snapshot(tracker_run=tracker_run)
        state = self.framework.load_state(find)
        return None if state is None else self.framework.restore(state)

    def _earlier(self) -> list[SnapshotManager]:
        """Return the other managers of this process that have the same training."""
        return [
            one
            for one in list(_managers)
            if one is not self and one._place == self._place and one._coordinator.pipeline.client.is_ours
        ]

    def _take_over(self) -> None:
        """Close the other managers of this process that save this training: a cell of a notebook was run again.

        Raises:
            ValueError: This one is closed.
        """
        if self._coordinator.closed:
            raise ValueError(self._closed_because)
        if self._saves:
            return
        self._saves = True
        for one in self._earlier():
            if one._saves:
                log.warning(
                    "ciuic: an earlier SnapshotManager of this process saves %r in %s: it is closed, and this one goes on",
                    self.name,
                    self.save_dir,
                )
                one._closed_because = (
                    f"the manager is closed, because a later SnapshotManager of this process saves {self.name!r} in "
                    f"{self.save_dir}: use that one, or give each a save_dir or a name= of its own"
                )
                one.close()

    def _await_saves(self) -> None:
        """Wait until what this process saved before can be loaded, whichever manager has saved it."""
        if not self._is_reader:
            for one in self._earlier():
                one._await_durable()
        super()._await_saves()

    def _busy(self) -> AbstractContextManager[None]:
        return super()._busy() if self._is_reader else self._coordinator.heartbeat.busy()

    # -- end

    def wait(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        """Wait until every staged save is durable, or has failed, also one that is due and waits for the next step to begin.

        Args:
            timeout_seconds: How long to wait at most; 0 only looks, and begins no save.

        Returns:
            Whether that came in time. `Save.error` and `stats` tell of failures.

        Raises:
            TypeError: Automatic snapshots were not taken, because the state has what cannot be stored.
            Exception: The same, and what an object of the program has raised twice in a row when asked for its state.
        """
        in_time = self._await_durable(timeout_seconds)
        if not self._is_reader and timeout_seconds > 0:
            self._coordinator.pipeline.raise_refusal()
        return in_time

    def _await_durable(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        if self._is_reader:
            return True
        if timeout_seconds > 0:
            self._coordinator.settle()
        return self._coordinator.pipeline.wait(timeout_seconds)

    def close(self, timeout_seconds: float = EXIT_SECONDS, *, remote_seconds: float = 0.0) -> None:
        """Wait for staged saves, at most so long, and let the writer go.

        The writer finishes what is not done by then all the same, and the upload goes on without this process.

        Args:
            timeout_seconds: How long to wait for staged saves to be durable, at most.
            remote_seconds: After that, how long to wait for every remote to have the newest snapshot, at most.
        """
        if self._is_reader or self._coordinator.closed:
            return
        self._coordinator.settle()
        # Before the rest: a signal handler of the program may close the manager in the middle of this.
        self._coordinator.stop()
        # Otherwise the interpreter would keep the manager, and all that is registered, until its end.
        atexit.unregister(self.close)
        _managers.discard(self)
        self._coordinator.close(timeout_seconds, sys.exc_info()[1])
        if (
            remote_seconds > 0
            and self._coordinator.pipeline.copies.orders
            and not self.wait_remote(remote_seconds)
        ):
            log.warning("ciuic: the newest snapshot is not on every remote yet; its upload goes on")

    def __enter__(self) -> SnapshotManager:
        """Return the manager; the end of the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the manager."""
        self.close()
