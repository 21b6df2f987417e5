"""Rounds of collectors, as this process has read them: which packs count as not stored.

A round condemns packs in ``gc/<r>``; from ``gc/<r>.final`` on only what that names is deleted. Objects of rounds are
never deleted, so a host that was away for long reads what it missed.

References:
    docs/remote-format.md, section 8
"""

from __future__ import annotations

from typing import Final

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.documents import StoredRound, read_round
from ciuic.remote.format.names import (
    MAX_NUMBER,
    ROUNDS_PREFIX,
    PackRef,
    RoundPart,
    parse_round,
    round_name,
)
from ciuic.remote.log.errors import IncompleteListing, missing_object_error
from ciuic.remote.objects.model import NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer

# A round may begin between a listing and the question for the next one.
_ATTEMPTS: Final = 3
_MISSING: Final = "other objects say that it must be there, but it is missing"


class Rounds:
    """Packs and manifests that rounds condemned. Not thread-safe.

    Args:
        objects: The remote.
        sealer: Its seals.
        known: Last round whose deletions the caller's index has (`RemoteIndex.rounds_finished`); it and those before it
            are not read. -1 for none. None for a caller that will list all packs after the first `refresh`: then
            no round that has ended before it is read.
    """

    def __init__(self, objects: Objects, sealer: Sealer, *, known: int | None = -1) -> None:
        self._objects = objects
        self._sealer = sealer
        self._read: dict[int, tuple[RoundPart, StoredRound]] = {}
        self._skip_ended = known is None
        self.finished = -1 if known is None else known
        """Last round of which everything that it deletes is deleted, as all before it; -1 for none."""
        self.last = self.finished
        """Last round that was begun; -1 for none."""
        self.version = 0
        """Number that grows whenever more is condemned than before."""
        self.condemned: frozenset[PackRef] = frozenset()
        """Packs that count as not stored: a round deleted them, or may yet."""
        self.manifests: frozenset[str] = frozenset()
        """Manifests of which the same holds; their names must not be used again."""

    @property
    def unfinished(self) -> int | None:
        """Number of the round that is under way, or None."""
        return self.last if self.last > self.finished else None

    @property
    def deleted(self) -> frozenset[PackRef]:
        """Packs that finished rounds deleted, of those that were read and not forgotten."""
        read = (content for round_, (_, content) in self._read.items() if round_ <= self.finished)
        return frozenset(PackRef(ref) for content in read for ref in content.condemned)

    def content(self, round_: int) -> tuple[RoundPart, StoredRound]:
        """Return the furthest part of a round that was read, ``begun`` or ``final``, and its content."""
        return self._read[round_]

    def refresh(self) -> None:
        """Read what rounds have condemned since the last call. One LIST, a HEAD, and a GET for each new part.

        Raises:
            RolledBack: a round that was seen is missing.
            IncompleteListing: the listing lacks a round that is there.
            DamagedRemote: a round cannot be read.
        """
        before = (self.condemned, self.manifests)
        parts, last = self._list_all()
        if self._skip_ended and parts:
            self.finished = last if "done" in parts[last] else last - 1
            if self.finished >= 0:
                # Names are not sealed: one that anybody made up must not hide the rounds before it.
                try:
                    read_round(self._objects, self._sealer, self.finished, "done")
                except NoSuchObject as error:
                    raise DamagedRemote(error.name, _MISSING) from None
        self._skip_ended = False
        for round_ in range(self.finished + 1, last + 1):
            # A round begins only after the one before has ended. A listing may lack what was created while it was
            # made: .final beside .done, or a whole round before a later one.
            ended = round_ < last or not parts[round_].isdisjoint(("final", "done"))
            self._learn(round_, ended)
            if round_ < last or "done" in parts[round_]:
                self.finished = round_
        self.last = last
        self._count(before)

    def forget(self) -> None:
        """Stop counting what finished rounds deleted; the caller's index no longer has it."""
        for round_ in [r for r in self._read if r <= self.finished]:
            del self._read[round_]
        self._unite()

    def _list_all(self) -> tuple[dict[int, set[RoundPart]], int]:
        """Return the parts as `_list` does, and the last round, after which none is there."""
        for _ in range(_ATTEMPTS):
            parts = self._list()
            last = max(parts, default=self.last)
            # Rounds have no gaps. A writer that misses one relies on what is about to be deleted.
            if last == MAX_NUMBER or self._objects.info(round_name(last + 1)) is None:
                return parts, last
        raise IncompleteListing(ROUNDS_PREFIX, round_name(last + 1))

    def _list(self) -> dict[int, set[RoundPart]]:
        """Return the parts of each round that is not known to be finished; checks that the last known one is there."""
        after = round_name(self.finished - 1, "final") if self.finished > 0 else ""
        parts: dict[int, set[RoundPart]] = {}
        for info in self._objects.list(ROUNDS_PREFIX, after=after):
            if name := parse_round(info.name):
                parts.setdefault(name.round, set()).add(name.part)
        if self.finished >= 0 and "done" not in parts.get(self.finished, ()):
            known = round_name(self.finished, "done")
            raise missing_object_error(
                self._objects, ROUNDS_PREFIX, known, "this round had ended, and is missing now"
            )
        if self.last > self.finished and self.last not in parts:
            known = round_name(self.last)
            raise missing_object_error(
                self._objects, ROUNDS_PREFIX, known, "this round was there, and is missing now"
            )
        return {
            round_: found for round_, found in parts.items() if round_ > self.finished or self._skip_ended
        }

    def _learn(self, round_: int, ended: bool) -> None:
        known = self._read.get(round_)
        if known is None or (ended and known[0] == "begun"):
            part: RoundPart = "final" if ended else "begun"
            try:
                self._read[round_] = (part, read_round(self._objects, self._sealer, round_, part))
            except NoSuchObject as error:
                raise DamagedRemote(error.name, _MISSING) from None

    def _count(self, before: tuple[frozenset[PackRef], frozenset[str]]) -> None:
        self._unite()
        # What was rescued from a round counts as stored again, which no caller has to hear of.
        if not (self.condemned <= before[0] and self.manifests <= before[1]):
            self.version += 1

    def _unite(self) -> None:
        contents = [content for _, content in self._read.values()]
        self.condemned = frozenset(PackRef(ref) for content in contents for ref in content.condemned)
        self.manifests = frozenset(name for content in contents for name in content.manifests)
