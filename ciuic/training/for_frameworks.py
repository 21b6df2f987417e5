"""What `SnapshotManager` has for frameworks that call it from their hooks (ciuic.integrations): they put objects back themselves, start
torch.distributed after the manager was made, and ask rank 0 alone to save.

Guarantees: what is collective says so, and is called by every rank or by none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ciuic.training.last_save import LastSave
from ciuic.training.loading import load_latest, load_together
from ciuic.training.outcome import Save, State
from ciuic.training.pace import Pace
from ciuic.training.rank_state import Mine
from ciuic.training.ranks import Ranks
from ciuic.training.registered import Registered
from ciuic.training.taking import Gone, Run, Taker, Wanted
from ciuic.training.together import Agreed


class ForFrameworks:
    """A part of the manager, which makes all of these."""

    save_dir: Path
    _root: bytes
    _may_join: bool
    """It was not said that this process saves by itself."""
    _registered: Registered
    _run: Run
    _pace: Pace
    _taker: Taker
    _last: LastSave | None

    def load_latest_snapshot(self) -> State | None:
        raise NotImplementedError

    def load_snapshot(self, snapshot: str) -> State:
        raise NotImplementedError

    def take(self, objects: Mapping[str, Any], *, with_position: bool = False) -> None:
        """As `register`, for saving when asked alone: nothing of the objects is watched. TypeError.

        ``with_position``: one of them knows where the run is in its data.
        """
        self._registered.take(objects, with_position=with_position)

    def save_handed(
        self,
        parts: list[Mine] | Agreed | Gone | None,
        *,
        epoch: int | None = None,
        step: int | None = None,
        tags: tuple[str, ...] = (),
        hold: str = "",
    ) -> Save | None:
        """As `save_snapshot`, on rank 0 alone, with what `hand_over` returned there; None: with nothing of the others."""
        if epoch is not None:
            self._run.epoch = epoch
        if step is not None:
            self._run.step = step
        return self._taker.take(Wanted("asked for", epoch, tags=tags, hold=hold, may_wait=True), parts)

    def hand_over(self) -> list[Mine] | Agreed | Gone | None:
        """For frameworks that ask rank 0 alone to save: called on every rank before that, so that what each has of its own goes with it."""
        parts = self._taker.gather_parts(may_wait=True)
        if not self._taker.writes:
            self._taker.take(Wanted("asked for"), parts)
        return parts

    def join_ranks(self, *, prepare: bool = True) -> None:
        """Meets the other ranks, where torch.distributed was initialized after this manager was made: all call it, or none.

        ``prepare``: False where the states of what is registered may be asked for by all ranks at once alone.
        """
        if not self._may_join:
            return
        if self._taker.ranks is None and (ranks := Ranks.meet(os.fsdecode(self._root[1:]))) is not None:
            self._taker.ranks = ranks
            self._taker.prepared = self._taker.prepared or not ranks.saves
            self._pace.vote = ranks.vote()
            if self._last is not None and self._last.agree is None:
                self._last.agree = ranks.vote()
        if self._taker.ranks is not None and not prepare:
            self._taker.prepared = True

    def load_to_resume(self, find: Callable[[], State | None] | None = None) -> State | None:
        """As `load_latest_snapshot`, but on every rank that which rank 0 finds (by ``find``), with what was this rank's own, and of what
        is sharded this rank's part. Called by all."""
        ranks, likes = self._taker.ranks, self._registered.likes()
        if ranks is not None:
            return load_together(ranks, self.save_dir, self._root, likes, find)
        return find() if find is not None else load_latest(self.save_dir, self._root, likes)
