"""`TrainingSnapshots`: the snapshots of one training, to list, choose, load and mark, without a writer.

Guarantees: only `tag`, `hold` and `release` change the repository, durably on return; what is loaded was
checked byte for byte. A snapshot that is chosen by step, epoch or metric has what was asked for, and no other snapshot
of the training has it too; else `NotFound` says which there are. Of equally good snapshots the oldest is the best, as
the rule `Best` keeps it. A snapshot whose facts cannot be read is no candidate, which is logged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeVar, overload

from ciuic.errors import NotFound, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.training import arguments, loading
from ciuic.training.arguments import warn_deprecated
from ciuic.training.convert import exporting
from ciuic.training.format.reading import Facts, SavedSnapshot, saved_snapshots
from ciuic.training.logs import log
from ciuic.training.remote.copies import RemoteCopies, RemoteProgress
from ciuic.training.results import EXIT_SECONDS, State
from ciuic.training.rules import Best, Mode, RetentionCandidate, best_of
from ciuic.training.state_diff import StateDiff, aligned_text, diff_states, html_table
from ciuic.training.writer import marks
from ciuic.types import SnapshotId
from ciuic.units import human_size, plural

_BEST: Final = "best"
"""Name by which the best snapshot is asked for beside ids."""
_SHOWN: Final = 8


def _by_name(repository: Repository, name: str, root: bytes) -> SnapshotId:
    """Return the id for an id, an unambiguous prefix of one, ``latest``, ``latest~2``, or a time.

    The last three name snapshots of the training with this root alone.

    Raises:
        NotFound: There is no such snapshot, or there are several.
    """
    try:
        return repository.snapshots.resolve(name, root)
    except UsageError as error:
        raise NotFound(error.message, hint=error.hint) from None


def _by_facts(repository: Repository, root: bytes, *, step: int | None, epoch: int | None) -> SnapshotId:
    """Return the id of the only snapshot with this step and epoch; None: any.

    Raises:
        NotFound: There is no such snapshot, or there are several.
    """
    saved = _readable(repository, root)
    found = [
        one
        for one in saved
        if (step is None or step == one.facts.step) and (epoch is None or epoch == one.facts.epoch)
    ]
    if len(found) == 1:
        return SnapshotId(found[0].id)
    wanted = " and ".join(
        f"{name} {value}" for name, value in (("step", step), ("epoch", epoch)) if value is not None
    )
    if found:
        raise NotFound(
            f"{len(found)} snapshots have {wanted}: {_listed(found)}",
            hint="load one of them by its id, or give both step and epoch",
        )
    raise NotFound(f"no snapshot has {wanted}; there are {_listed(saved) or 'none'}")


def _of_tracker_run(save_dir: Path, root: bytes, run: str) -> State:
    """Return the newest whole state that was logged to a run of a tracker.

    Raises:
        NotFound: None that was is left.
        NoUsableSnapshot: Some were, and none is whole.
    """
    state = loading.load_latest(save_dir, root, wanted=lambda facts: run in _tracker_runs(facts))
    if state is not None:
        return state
    with Repository.open(save_dir) as repository:
        saved = _readable(repository, root)
    runs = list(dict.fromkeys(known for one in saved for known in _tracker_runs(one.facts)))
    shown = ", ".join(map(one_line, runs[:_SHOWN])) + (
        f" and {len(runs) - _SHOWN} more" if runs[_SHOWN:] else ""
    )
    # Nothing says whether there was one: rules and later runs remove a snapshot without a trace.
    raise NotFound(
        f"{save_dir} has no snapshot of the run {one_line(run)}: none was logged to it, or they have been removed; "
        + (f"there are snapshots of {shown}" if runs else "no snapshot there was logged to a tracker")
        + (f", the newest is {_in_words(saved[0])}" if saved else ""),
        hint="resume() without tracker_run takes the newest whole snapshot",
    )


def _tracker_runs(facts: Facts) -> list[str]:
    return [run["run"] for run in facts.trackers.values() if "run" in run]


def _best_rule(rules: Iterable[Best], metric: str | None, mode: Mode | None) -> Best | None:
    """Return the rule that says which snapshot is best.

    Args:
        rules: Rules by which the manager keeps the best snapshots.
        metric: Metric that was asked for; None: that of the rules.
        mode: Mode that was asked for; None: that of the rule for the metric, else ``min``.

    Returns:
        The rule; None if neither the rules nor the caller name a metric.

    Raises:
        NotFound: The rules name several metrics.
        ValueError: There is a mode without a metric, or it is neither ``min`` nor ``max``.
    """
    known = list(dict.fromkeys((rule.metric, rule.mode) for rule in rules))
    if metric is None and mode is not None:
        raise ValueError(f"mode={mode!r} needs a metric: load_best('loss', {mode!r})")
    if mode is None:
        known = [one for one in known if metric in (None, one[0])]
        if len(known) > 1:
            names = ", ".join(f"Best(…, {name!r}, {one!r})" for name, one in known)
            raise NotFound(
                f"keep has several rules for the best: {names}", hint="give load_best metric and mode"
            )
        if known:
            return Best(1, *known[0])
    return None if metric is None else Best(1, metric, mode or "min")


def _best(repository: Repository, root: bytes, rule: Best | None) -> SnapshotId:
    """Return the id of the best snapshot.

    Raises:
        NotFound: There is no rule, or no snapshot has a finite value of the metric.
    """
    saved = _readable(repository, root)
    names = sorted({name for one in saved for name in one.facts.metrics})
    metrics = f"there are {', '.join(map(one_line, names))}" if names else "there are none"
    if rule is None:
        raise NotFound(
            f"which metric is best is not known; of metrics {metrics}",
            hint="load_best('loss', 'min'), or SnapshotManager(…, keep=[Best(1, 'loss')])",
        )
    # In the order in which retention counts: of equally good ones the oldest.
    saved.sort(key=lambda one: (one.time_ns, one.id))
    candidates = [RetentionCandidate(one.id, one.time_ns, metrics=one.facts.metrics) for one in saved]
    found = best_of(rule, candidates)
    if not found:
        raise NotFound(
            f"no snapshot has a finite {one_line(rule.metric)}; of metrics {metrics}, "
            f"of snapshots {_listed(saved) or 'none'}"
        )
    return SnapshotId(found[0].id)


def _readable(repository: Repository, root: bytes) -> list[SavedSnapshot]:
    """Return the snapshots of the training, newest first; log how many cannot be read."""
    saved = saved_snapshots(repository, root)
    unreadable = len(repository.snapshots.list(root=root)) - len(saved)
    if unreadable > 0:
        # Nobody can tell whether one of them is what was asked for.
        log.warning("ciuic: %s cannot be read, and is passed over", plural(unreadable, "snapshot"))
    return saved


def _listed(saved: Sequence[SavedSnapshot]) -> str:
    shown = [_in_words(one) for one in saved[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(saved) - _SHOWN} more" if len(saved) > _SHOWN else "")


def _in_words(one: SavedSnapshot) -> str:
    known = (("step", one.facts.step), ("epoch", one.facts.epoch))
    facts = ", ".join(f"{name} {value}" for name, value in known if value is not None)
    return f"{one.id} ({facts})" if facts else one.id


_HEADERS: Final = ("id", "time", "step", "epoch", "metrics", "size", "new", "tags")
_NUMERIC: Final = ("step", "epoch", "size", "new")
_EMPTY: Final = "no snapshots"
# On every snapshot of a training, so it tells nothing.
_EVERYWHERE: Final = "training"


class SnapshotTable(list[SavedSnapshot]):
    """Snapshots, newest first. Does not change when snapshots come and go; slices are tables.

    Text and HTML show the newest 60. Times are local. ``size`` is that of the state, ``new`` the growth of the
    repository.
    """

    @overload
    def __getitem__(self, at: SupportsIndex) -> SavedSnapshot: ...

    @overload
    def __getitem__(self, at: slice) -> SnapshotTable: ...

    def __getitem__(self, at: SupportsIndex | slice) -> SavedSnapshot | SnapshotTable:
        found = super().__getitem__(at)
        return SnapshotTable(found) if isinstance(found, list) else found

    def __repr__(self) -> str:
        if not self:
            return _EMPTY
        return aligned_text(_HEADERS, [_row(one) for one in self], _NUMERIC, "earlier")

    def _repr_html_(self) -> str:
        """Return the table for a notebook; everything from the repository is escaped."""
        if not self:
            return f"<p>{_EMPTY}</p>"
        return html_table(_HEADERS, [_row(one) for one in self], _NUMERIC, "earlier")


def _row(saved: SavedSnapshot) -> list[str]:
    facts = saved.facts
    return [
        saved.id,
        _clock(saved.time_ns),
        "" if facts.step is None else str(facts.step),
        "" if facts.epoch is None else str(facts.epoch),
        ", ".join(f"{name} {value:.4g}" for name, value in facts.metrics.items()),
        human_size(saved.size_bytes),
        human_size(saved.new_bytes),
        ", ".join([*(["held"] if saved.held else []), *(tag for tag in saved.tags if tag != _EVERYWHERE)]),
    ]


def _clock(time_ns: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns // 10**9))
    # A crafted snapshot may have any time.
    except (OverflowError, ValueError, OSError):
        return "?"


_Self = TypeVar("_Self", bound="TrainingSnapshots")


class TrainingSnapshots:
    """Snapshots of one training in a repository.

    A copy is the object itself, and a pickle has directory, name and the rules of the best alone: frameworks hold
    managers in objects that programs copy and pickle (a Trainer, a strategy), and one out of a pickle must neither
    create a repository on another machine nor save into one.
    """

    def __init__(self, save_dir: str | os.PathLike[str], name: str = "training") -> None:
        """Open nothing yet.

        Args:
            save_dir: Directory of the repository.
            name: Name of the run.
        """
        self.save_dir = Path(save_dir)
        self.name = name
        self._best_rules: tuple[Best, ...] = ()
        """Rules of the manager that keep the best snapshots."""
        self._copies: RemoteCopies | None = None
        """Copies on the manager's remotes."""

    @property
    def _root(self) -> bytes:
        """Path of the training in its snapshots."""
        return os.fsencode(f"/{self.name}")

    def load_latest_snapshot(self) -> State | None:
        """Return the newest state that is whole, as `load_snapshot()` does; None if there is no snapshot.

        Raises:
            NoUsableSnapshot: There are snapshots, and none is whole (a `Damaged`).
        """
        self._await_saves()
        return loading.load_latest(self.save_dir, self._root)

    def load_snapshot(
        self,
        snapshot: str | None = None,
        *,
        step: int | None = None,
        epoch: int | None = None,
        tracker_run: str | None = None,
    ) -> State:
        """Return the state of one snapshot: the newest that is whole or, if one is named, exactly that one.

        Waits until the saves of this process are durable. The state is a dict: ``NAME_state_dict`` of each object
        as ``state_dict()`` returned it, tensors on the CPU with the shapes and dtypes that were saved (whole ones, of
        sharded states too), ``epoch``, ``step``, ``metrics`` (a dict), ``random_state`` and the values that were
        saved by name; every byte of it was checked.

        Args:
            snapshot: An id, an unambiguous prefix of one, or, of this training alone, ``latest``,
                ``latest~2``, a time, or ``best``, as `load_best()` finds it.
            step: Optimizer steps of the run at the snapshot.
            epoch: Epoch that was recorded with it.
            tracker_run: Id of a run of MLflow, Weights & Biases or another tracker: the newest whole snapshot that
                was logged to it (`SnapshotManager.track`).

        Raises:
            NotFound: There is no such snapshot, or there are several; the message names what is there.
            Damaged: The snapshot that is named is not as it was saved; no other is loaded in its place. Or none
                is named, and none is whole (`NoUsableSnapshot`).
            ValueError: This version of ciuic or of the framework does not know what was saved, or it is named
                in two ways.
        """
        if tracker_run is not None:
            if not (step is None and epoch is None and snapshot is None):
                raise ValueError("load_snapshot must get tracker_run= alone, or none")
            self._await_saves()
            with self._busy():
                return _of_tracker_run(self.save_dir, self._root, tracker_run)
        if step is None and epoch is None and snapshot is None:
            newest = self.load_latest_snapshot()
            if newest is None:
                raise NotFound(f"no snapshot of {self.name!r} in {self.save_dir}")
            return newest
        if snapshot is not None and (step is not None or epoch is not None):
            raise ValueError("load_snapshot must get an id or name, or step= and epoch=")
        step = None if step is None else arguments.whole_number(step, "step")
        epoch = None if epoch is None else arguments.whole_number(epoch, "epoch")
        self._await_saves()
        with self._busy():
            return loading.load_one(
                self.save_dir,
                lambda repository: (
                    _by_facts(repository, self._root, step=step, epoch=epoch)
                    if snapshot is None
                    else self._named(repository, snapshot)
                ),
            )

    def load_best(self, metric: str | None = None, mode: Mode | None = None) -> State:
        """Return the state of the snapshot whose metric is best, as the rule `Best` understands it.

        Snapshots without the metric, or with NaN or an infinity, do not count; of equally good ones the
        oldest is the best.

        Args:
            metric: Name of the metric; None: that of the manager's rule ``keep=[Best(…)]``.
            mode: ``min`` if smaller is better, ``max`` if larger is; None: as that rule says, else ``min``.

        Raises:
            NotFound: No snapshot has the metric, or neither the caller nor the manager's rules name one, or
                the rules name several; the message names what is there.
            Damaged: The best snapshot is not as it was saved. No other is loaded in its place.
            ValueError: This version of ciuic or of the framework does not know what was saved, or the mode is
                neither, or has no metric.
        """
        rule = _best_rule(self._best_rules, metric, mode)
        self._await_saves()
        with self._busy():
            return loading.load_one(self.save_dir, lambda repository: _best(repository, self._root, rule))

    def list_snapshots(self) -> SnapshotTable:
        """Return the snapshots of this training, newest first, as a list that prints as a table, also in notebooks.

        Local ones alone, durable ones alone; those that cannot be read are left out. Their content is not read.

        Raises:
            CiuicError: The repository cannot be opened.
        """
        return SnapshotTable(loading.list_snapshots(self.save_dir, self._root))

    def snapshots(self) -> SnapshotTable:
        """Do what `list_snapshots` does, under its old name."""
        warn_deprecated("SnapshotManager.snapshots", "SnapshotManager.list_snapshots")
        return self.list_snapshots()

    def diff(self, old: str, new: str, *, whole: bool = True) -> StateDiff:
        """Return how the tensors of two snapshots differ: norm of the change, largest change, cosine, NaN, Inf.

        Tensors whose files are the same are not read. Of others the blocks that differ are read on both
        sides, and the blocks that are the same once, for the norm of the whole tensor.

        Args:
            old: The snapshot before; an id or name, as for `load_snapshot`.
            new: The snapshot after.
            whole: False: never read a block that is the same on both sides. Tensors with such blocks then have
                no relative change and no cosine.

        Raises:
            NotFound: There is no such snapshot, or it holds no training state.
            Damaged: Something is not as it was saved.
            CiuicError: NumPy is not installed.
        """
        with self._busy(), Repository.open(self.save_dir) as repository:
            return diff_states(
                repository, self._named(repository, old), self._named(repository, new), whole=whole
            )

    def _named(self, repository: Repository, name: str) -> SnapshotId:
        """Return the id of a snapshot that is named by an id, in a way of `_by_name`, or as the best."""
        if name == _BEST:
            return _best(repository, self._root, _best_rule(self._best_rules, None, None))
        return _by_name(repository, name, self._root)

    def _id_of(self, name: str) -> str:
        with Repository.open(self.save_dir) as repository:
            return str(self._named(repository, name))

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        to: str,
        snapshot: str | None = None,
        only: Sequence[str] = (),
        ranks: int = 1,
        overwrite: bool = False,
    ) -> exporting.Exported:
        """Write a state in a format of others, durably on return (docs/export.md).

        The state is read into memory as a whole. Waits for the saves of this manager first.

        Args:
            path: Destination, in a directory that exists.
            to: ``torch`` or ``safetensors`` or ``npz`` (a file), ``hf`` or ``dcp`` (a folder).
            snapshot: As in `load_snapshot`; None: the newest of this training that can be read whole.
            only: Names of the objects to export; none: all.
            ranks: Number of ranks for which ``dcp`` cuts the tensors.
            overwrite: Whether to replace what an earlier export has written there.

        Raises:
            UsageError: An argument is wrong, or a package is not installed.
            NotFound: There is no such snapshot or object.
            Damaged: The snapshot is not as it was saved.
            DestinationExists: There is something at ``path`` that may not be replaced.
        """
        self._await_saves()
        with self._busy():
            return exporting.export(
                self.save_dir,
                Path(path),
                to,
                root=self._root,
                snapshot=None if snapshot is None else self._id_of(snapshot),
                only=only,
                ranks=ranks,
                overwrite=overwrite,
            )

    def _busy(self) -> AbstractContextManager[None]:
        """Return a context in which a manager records that there are no steps."""
        return nullcontext()

    def _await_saves(self) -> None:
        """Wait until what this process saved before can be loaded: what is loaded is never older than the last save."""
        if not self._await_durable():
            log.warning("ciuic: a save of this process is not durable yet; an older snapshot may be loaded")

    def wait(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        """Return True: only a manager has saves to wait for."""
        return self._await_durable(timeout_seconds)

    def _await_durable(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        return True

    def wait_remote(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        """Wait until every staged save is durable and every remote has stored the newest snapshot.

        Returns:
            Whether that came in time. `remote_status` says what it waits for.

        Raises:
            ValueError: There is no remote.
        """
        if self._copies is None or not self._copies.orders:
            raise ValueError("there is no remote to wait for: pass remote= or a URL as save_dir")
        end = time.monotonic() + timeout_seconds
        if not self.wait(timeout_seconds):
            return False
        return self._copies.wait_newest(self._root, end - time.monotonic())

    def remote_status(self) -> list[RemoteProgress]:
        """Return how far each remote of the manager is; contacts nothing."""
        return [] if self._copies is None else self._copies.progress()

    def tag(self, snapshot: str, *tags: str) -> None:
        """Add tags to a snapshot, named as in `load_snapshot`, durably on return.

        Raises:
            NotFound: There is no such snapshot.
            Busy: Another process holds the lock of the repository for longer than a minute.
        """
        marks.tag(self.save_dir, self._id_of(snapshot), tags)

    def hold(self, snapshot: str, reason: str = "held") -> None:
        """Keep a snapshot until `release`, whatever the rules say, durably on return; raises as `tag`."""
        marks.hold(self.save_dir, self._id_of(snapshot), reason)

    def release(self, snapshot: str) -> None:
        """Undo `hold`, durably on return; raises as `tag`."""
        marks.release(self.save_dir, self._id_of(snapshot))

    def __copy__(self: _Self) -> _Self:
        """Return the object itself."""
        return self

    def __deepcopy__(self: _Self, _: Mapping[int, Any]) -> _Self:
        """Return the object itself."""
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle where the snapshots are, and which is the best."""
        return _reader_of, (type(self), str(self.save_dir), self.name, self._best_rules)


def _reader_of(kind: type[_Self], save_dir: str, name: str, best_rules: tuple[Best, ...]) -> _Self:
    """Return an object of this class that opens nothing, and only reads."""
    found = kind.__new__(kind)
    TrainingSnapshots.__init__(found, save_dir, name)
    found._best_rules = best_rules
    return found
