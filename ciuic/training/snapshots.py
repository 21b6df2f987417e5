"""`TrainingSnapshots`: the snapshots of one training, to list, load and mark, without a writer.

Guarantees: only `tag`, `hold` and `release` change the repository, durably on return; what is loaded was
checked byte for byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ciuic.errors import NotFound
from ciuic.repository import Repository
from ciuic.training import loading
from ciuic.training.compare.state_diff import StateDiff, diff_states
from ciuic.training.export import exporting
from ciuic.training.format.results import EXIT_SECONDS, State
from ciuic.training.listing import choice
from ciuic.training.listing.snapshot_table import SnapshotTable
from ciuic.training.policy.policies import Mode
from ciuic.training.policy.retention_rules import Best
from ciuic.training.remote.copies import RemoteCopies, RemoteProgress
from ciuic.training.state import validation
from ciuic.training.util.deprecation import warn_deprecated
from ciuic.training.util.logs import log
from ciuic.training.writer import marks
from ciuic.types import SnapshotId

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
            NothingGood: There are snapshots, and none is whole (a `Damaged`).
        """
        self._await_saves()
        return loading.load_latest(self.save_dir, self._root)

    def load_snapshot(
        self, snapshot: str | None = None, *, step: int | None = None, epoch: int | None = None
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

        Raises:
            NotFound: There is no such snapshot, or there are several; the message names what is there.
            Damaged: The snapshot that is named is not as it was saved; no other is loaded in its place. Or none
                is named, and none is whole (`NothingGood`).
            ValueError: This version of ciuic or of the framework does not know what was saved, or it is named
                in two ways.
        """
        if step is None and epoch is None and snapshot is None:
            newest = self.load_latest_snapshot()
            if newest is None:
                raise NotFound(f"no snapshot of {self.name!r} in {self.save_dir}")
            return newest
        if snapshot is not None and (step is not None or epoch is not None):
            raise ValueError("load_snapshot must get an id or name, or step= and epoch=")
        step = None if step is None else validation.whole_number(step, "step")
        epoch = None if epoch is None else validation.whole_number(epoch, "epoch")
        self._await_saves()
        return loading.load_one(
            self.save_dir,
            lambda repository: (
                choice.by_facts(repository, self._root, step=step, epoch=epoch)
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
        rule = choice.best_rule(self._best_rules, metric, mode)
        self._await_saves()
        return loading.load_one(self.save_dir, lambda repository: choice.best(repository, self._root, rule))

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
        with Repository.open(self.save_dir) as repository:
            return diff_states(
                repository, self._named(repository, old), self._named(repository, new), whole=whole
            )

    def _named(self, repository: Repository, name: str) -> SnapshotId:
        """Return the id of a snapshot that is named by an id, in a way of `choice.by_name`, or as the best."""
        if name == choice.BEST:
            return choice.best(repository, self._root, choice.best_rule(self._best_rules, None, None))
        return choice.by_name(repository, name, self._root)

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

    def _await_saves(self) -> None:
        """Wait until what this process saved before can be loaded: what is loaded is never older than the last save."""
        if not self.wait():
            log.warning("ciuic: a save of this process is not durable yet; an older snapshot may be loaded")

    def wait(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        """Return True: only a manager has saves to wait for."""
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
