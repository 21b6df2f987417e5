"""One snapshot, taken of what is registered as it is now: by this process alone, or by rank 0 with what the others hand over.

Guarantees: on several ranks all of them count from the step of a snapshot, whatever becomes of it. What goes wrong is logged and counted
(`Saver`), but for what the program itself has wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ciuic.training import given, randomness, rank_state
from ciuic.training.alone import Alone
from ciuic.training.completeness import missing
from ciuic.training.description import finite, floats, replaced, summary, versions
from ciuic.training.filesystem import Filesystem, Roots, planned_id
from ciuic.training.logs import log, quietly
from ciuic.training.messages import Manifest
from ciuic.training.outcome import Save
from ciuic.training.pace import Pace
from ciuic.training.parts import refuse
from ciuic.training.rank_state import Mine
from ciuic.training.ranks import Ranks, RanksApart
from ciuic.training.reading import Facts
from ciuic.training.registered import Registered
from ciuic.training.saver import Saver
from ciuic.training.shards import are_sharded
from ciuic.training.staging import gather
from ciuic.training.together import Agreed, agree, part_of

TAG: Final = "training"


class Run:
    """Where it is."""

    def __init__(self) -> None:
        self.id = os.urandom(16).hex()
        """The same after a resume."""
        self.step = 0
        self.epoch: int | None = None
        """As the program gave it last."""


class Remembered(NamedTuple):
    """Of the last boundary, what an evaluation changes."""

    random: dict[str, Any]
    positions: dict[str, Any]
    epoch: int | None


class Wanted(NamedTuple):
    """What kind of snapshot."""

    reason: str
    epoch: int | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    plain: Mapping[str, Any] = MappingProxyType({})
    tags: tuple[str, ...] = ()
    hold: str = ""
    """A reason for which it is kept for ever."""
    filesystem: Roots | None = None
    """The files of the same instant; None: as the manager has it."""
    asked: bool = False
    """By the program, perhaps of this rank alone."""
    may_wait: bool = False
    """For the writer to be done with an earlier one."""
    as_it_was: Remembered | None = None
    """Instead of generators and positions as they are."""


def asked_for(
    model: Any,
    optimizer: Any,
    epoch: Any,
    others: Mapping[str, Any],
    metrics: Mapping[str, Any],
    tags: Any,
    hold: Any,
    filesystem: Roots | None,
) -> tuple[dict[str, Any], Wanted]:
    """(objects by name, what is wanted) by a program that calls `save_snapshot`. TypeError."""
    objects, plain = given.objects_and_values(model, optimizer, others)
    return objects, Wanted(
        "asked for",
        None if epoch is None else given.whole_number(epoch, "epoch"),
        given.numbers(metrics),
        plain,
        given.texts(tags),
        given.reason(hold),
        filesystem,
        asked=True,
        may_wait=True,
    )


class Gone(NamedTuple):
    """Another rank has ended, or cannot be reached."""

    problem: str


class Taker:
    def __init__(
        self,
        run: Run,
        registered: Registered,
        pace: Pace,
        saver: Saver,
        ranks: Ranks | None,
        filesystem: Filesystem,
        alone: Alone,
    ) -> None:
        self.run = run
        self.alone = alone
        self.ranks = ranks
        """None where this process saves for itself."""
        self.prepared = False
        """There is room for a first save, or none is needed."""
        self._registered = registered
        self._pace = pace
        self._saver = saver
        self._repository = saver.client.repository
        self._filesystem = filesystem
        saver.saved = filesystem.heard
        self._complained = False
        self._met = False
        self._is_silent = False

    @property
    def writes(self) -> bool:
        """Whether it is this process that writes."""
        return not self._is_silent if self.ranks is None else self.ranks.saves

    def prepare(self) -> None:
        """After the first step everything has its size."""
        self.prepared = True
        together = self._together
        if not self.writes and not together:
            return
        states = self._registered.states()
        if self.ranks is not None and together:
            self._saver.prepare(part_of(self._registered.objects, states, self.ranks.rank))
        else:
            self._saver.prepare(gather(states, {}, {}))
        self._saver.hear()

    @property
    def _together(self) -> bool:
        """Whether each rank has a part of the state."""
        return self.ranks is not None and are_sharded(self._registered.objects.values())

    def all_at_boundary(self) -> bool:
        """Whether the other ranks come to boundaries, too: asked at the first one, since what is agreed there would wait for them."""
        if self.ranks is not None and not self._met:
            with quietly("the other ranks are gone"):
                self._met = self.ranks.all_at_boundary()
            return self._met
        return True

    def leave_ranks(self) -> None:
        """From now on rank 0 saves by itself, and others nothing."""
        self._is_silent = not self.writes
        self.ranks = None

    def parts_when_asked(self, place: str) -> list[Mine] | Agreed | None:
        """As `gather_parts`, when the program asks for a snapshot, perhaps on rank 0 alone: then None. ``place``: where in the program."""
        if self.ranks is None:
            return None
        ranks = self.ranks
        ranks.begin_asked(self.run.step, place)
        try:
            if not self._together:
                return _received(ranks.hand_in(rank_state.mine(self._registered.objects).message()))
            if not ranks.all_asked():
                raise RanksApart(
                    "each rank has a part of the state, and not every rank has called save_snapshot"
                )
        except RanksApart as error:
            self._saver.failed(str(error))
            return [] if self._together else None
        return self._agree(ranks, may_wait=True)

    def wait_durable(self, save: Save | None, seconds: float) -> None:
        """For what the program asked for, on all ranks."""
        if save is not None:
            save.wait()
        if self.ranks is not None:
            with quietly("the other ranks are gone"):
                self.ranks.durable(seconds)

    def gather_parts(self, *, may_wait: bool) -> list[Mine] | Agreed | Gone | None:
        """What each rank has of its own, on rank 0; [] on the others. None where this process saves for itself. `Agreed` on all where each
        has a part of the state, and [] where they do not save. `Gone` where another rank has ended: there is no snapshot then, since one
        without that rank's generators and position would become the newest, and a resume of it would not be exact.

        ``may_wait``: for an arena to become free.
        """
        if self.ranks is None:
            return None
        # On all alike, whatever becomes of this one: they must find the next one due at the same step.
        self._pace.begin_at(self.run.step)
        if self._together:
            return self._agree(self.ranks, may_wait=may_wait)
        try:
            return _received(self.ranks.gather(rank_state.mine(self._registered.objects).message())) or []
        except RanksApart as error:
            return Gone(f"the other ranks are gone: {error}")

    def _agree(self, ranks: Ranks, *, may_wait: bool) -> Agreed | list[Mine]:
        client = self._saver.client
        if may_wait:
            self._saver.wait_for_room()
        try:
            states = self._registered.states()
            found = agree(
                ranks, self._repository, self._registered.objects, states, is_busy=not client.can_take
            )
            if found is None:
                self._saver.stats.skipped += 1
            return found or []
        except (RanksApart, OSError) as error:
            self._saver.failed(str(error))
            return []

    def take(self, wanted: Wanted, parts: list[Mine] | Agreed | Gone | None) -> Save | None:
        """None where it could not be staged, or another rank writes. Unsaveable."""
        if isinstance(parts, Gone):
            self._saver.failed(parts.problem)
            return None
        if isinstance(parts, Agreed):
            with self._saver.guard:
                if self.writes:
                    return self._staged(wanted, parts.parts, parts)
                self._part_staged(wanted, parts)
                return None
        if self._together:
            return None
        if not self.writes:
            self._taken(wanted)
            return None
        with self._saver.guard:
            return self._staged(wanted, parts)

    def _part_staged(self, wanted: Wanted, agreed: Agreed) -> None:
        """This rank's, for the snapshot that rank 0's writer makes."""
        began = time.monotonic()
        together, self.prepared = agreed.together, True
        states = self._registered.states()
        manifest = Manifest(time_ns=time.time_ns(), message="", tags=(), files=[], together=together)
        state = part_of(self._registered.objects, states, together.rank)
        save, _ = self._saver.stage(state, Facts(), manifest, may_wait=False, beside=False)
        if save is None:
            with quietly("rank 0 waits for this one's part in vain"):
                refuse(self._repository, together, self._saver.stats.last_error or "it has no room")
            return
        self._saver.stalled(time.monotonic() - began)
        self._taken(wanted)

    def _staged(self, wanted: Wanted, parts: list[Mine] | None, agreed: Agreed | None = None) -> Save | None:
        began = time.monotonic()
        self._saver.hear()
        self._say_what_is_missing()
        self.prepared = True
        states, random = self._registered.states(), randomness.state()
        if wanted.as_it_was is not None:
            states, random = states | wanted.as_it_was.positions, wanted.as_it_was.random
        values: dict[str, Any] = {"plain": list(wanted.plain), "random": random}
        if parts:
            values["ranks"] = rank_state.differing(parts)
        facts = self._facts(wanted, world_size=len(parts) if parts else 1)
        at_instant = self._filesystem.asker(wanted.filesystem)
        manifest = Manifest(
            time_ns=time.time_ns(),
            message=summary(facts),
            tags=(TAG, *wanted.tags),
            hold_reason=wanted.hold,
            files=[],
            together=None if agreed is None else agreed.together,
            id="" if at_instant is None else planned_id(),
        )
        claim = None if agreed is None else agreed.claim
        try:
            state = gather(states, wanted.plain, values, with_shards=agreed is not None)
            facts = replaced(facts, size_bytes=state.size_bytes if agreed is None else agreed.size_bytes)
            # What ranks have agreed on is handed over before they go on.
            beside = agreed is None and not wanted.may_wait
            save, skipped = self._saver.stage(
                state,
                facts,
                manifest,
                may_wait=wanted.may_wait,
                beside=beside,
                claim=claim,
                at_instant=at_instant,
            )
        finally:
            if claim is not None:
                claim.release()  # which does nothing if it was handed over
        if save is not None:
            self._saver.stalled(time.monotonic() - began)
            self._taken(wanted)
        elif skipped:
            self._pace.begin_at(self.run.step)
        return save

    def _taken(self, wanted: Wanted) -> None:
        """A snapshot was taken of this boundary, by this rank or by rank 0."""
        self._saver.changed = False
        # The others, which may not have been asked, must find the next one due at the same step.
        alone = wanted.asked and self.ranks is not None
        self._pace.taken(None if alone else self.run.step)

    def _facts(self, wanted: Wanted, world_size: int) -> Facts:
        epoch = wanted.epoch if wanted.as_it_was is None else wanted.as_it_was.epoch
        return Facts(
            step=self.run.step,
            epoch=self._registered.epoch(self.run.epoch) if epoch is None else epoch,
            metrics=finite(self._pace.reported | floats(wanted.metrics)),
            reason=wanted.reason,
            objects=tuple(self._registered.objects),
            run=self.run.id,
            framework=versions(),
            world_size=world_size,
        )

    def _say_what_is_missing(self) -> None:
        if not self._complained:
            self._complained = True
            self.alone.make_sure()
            for note in missing(self._registered.objects, has_position=self._registered.has_position):
                log.warning("ciuic: a resume would not be exact: %s", note)


def _received(messages: list[Any] | None) -> list[Mine] | None:
    """What ranks have sent of their own. RanksApart where one of them has sent something else."""
    try:
        return None if messages is None else [Mine.of(message) for message in messages]
    except ValueError as error:
        raise RanksApart(str(error)) from None
