"""Mutations of the protocol, each of one step of the real code. A test must notice each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ciuic.remote.format import documents
from ciuic.remote.format.documents import StoredRound, encode_log_entry, encode_round
from ciuic.remote.format.names import log_entry_name, round_name
from ciuic.remote.log import writer_log
from ciuic.remote.log.rounds import Rounds
from ciuic.remote.log.writer_log import WriterLog
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep import collector as collector_module
from ciuic.remote.upkeep.collector import CollectionResult, Collector

Patch = Callable[[pytest.MonkeyPatch], None]


def no_hello(patch: pytest.MonkeyPatch) -> None:
    """A writer begins without an entry in its log."""
    plain_begin, plain_stands = WriterLog._begin, WriterLog._stands

    def begin(self: WriterLog) -> None:
        # A collector takes the store's time from its own.
        if self._host == "collector":
            return plain_begin(self)
        self._become(self._new_id(), 0, "")
        self._lost = False
        self._rounds_unread = True
        return None

    def stands(self: WriterLog) -> bool:
        return self._next == 0 or plain_stands(self)

    patch.setattr(WriterLog, "_begin", begin)
    patch.setattr(WriterLog, "_continue", lambda self, known: False)
    patch.setattr(WriterLog, "_stands", stands)


def list_before_hello(patch: pytest.MonkeyPatch) -> None:
    """A writer reads the rounds first and says hello then."""

    def hello(self: WriterLog) -> None:
        self._read_rounds()
        known = self._state.load()
        self._lost = known is None or not self._continue(known)
        if self._lost:
            self._begin()
        self._rounds_unread = False
        self._said_hello = True

    patch.setattr(WriterLog, "hello", hello)


def stale_index(patch: pytest.MonkeyPatch) -> None:
    """A writer relies on its index as it was, whatever the rounds say that it reads when it begins."""
    plain = RemoteIndex.follow

    def follow(self: RemoteIndex, rounds: Any) -> None:
        # The collectors' own look-ups list all packs anyway.
        if rounds.unfinished is not None or rounds.finished > (self.rounds_finished or -1):
            return
        plain(self, rounds)

    patch.setattr(RemoteIndex, "follow", follow)
    patch.setattr(RemoteIndex, "_usable_numbers", lambda self: self._packs.refs.__contains__)


def unconditional_commit(patch: pytest.MonkeyPatch) -> None:
    """An entry is put in place of whatever stands there."""

    def create_entry(objects: Any, sealer: Any, writer: str, number: int, entry: Any) -> bool:
        objects.put(log_entry_name(writer, number), [encode_log_entry(sealer, writer, number, entry)])
        return True

    patch.setattr(writer_log, "create_entry", create_entry)


def fence_ignored(patch: pytest.MonkeyPatch) -> None:
    """A writer passes over a fence without reading the round."""
    plain = WriterLog._append

    def append(self: WriterLog, entry: Any) -> bool:
        before = self._rounds_unread
        done = plain(self, entry)
        self._rounds_unread = before
        return done

    patch.setattr(WriterLog, "_append", append)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A collector puts no fences into logs."""
    patch.setattr(Collector, "_fence_logs", lambda self, round_: None)


def fence_before_round(patch: pytest.MonkeyPatch) -> None:
    """A collector puts fences into logs, and creates the round then."""
    fence, begin = Collector._fence_logs, Collector._begin

    def fence_and_begin(self: Collector, proposal: StoredRound) -> None:
        fence(self, self._log.rounds.last + 1)
        begin(self, proposal)

    patch.setattr(Collector, "_begin", fence_and_begin)
    patch.setattr(Collector, "_fence_logs", lambda self, round_: None)


def no_second_list(patch: pytest.MonkeyPatch) -> None:
    """A collector decides by what it read before the round began."""
    patch.setattr(Collector, "_decide", lambda self, content: content)


def overlapping_rounds(patch: pytest.MonkeyPatch) -> None:
    """A collector begins a round while another is under way."""

    def run(self: Collector) -> CollectionResult:
        self._log.hello()
        rounds = self._log.rounds
        proposal = self._choose()
        if not proposal.condemned and not proposal.manifests:
            return CollectionResult(-1)
        mine = rounds.last + 1
        self._begin(proposal)
        content = documents.create_round(self._objects, self._sealer, mine, "begun", proposal)
        self._fence_logs(mine)
        content = documents.create_round(self._objects, self._sealer, mine, "final", self._decide(content))
        self._delete(content)
        documents.create_round(self._objects, self._sealer, mine, "done", StoredRound(nonce=self._new_id()))
        return CollectionResult(mine)

    def refresh(self: Rounds) -> None:
        # Several rounds are under way: each counts as far as it is.
        before = (self.condemned, self.manifests)
        parts = self._list()
        for round_ in parts:
            self._learn(round_, not parts[round_].isdisjoint(("final", "done")))
            self.last = max(self.last, round_)
        self._count(before)

    patch.setattr(Collector, "run", run)
    patch.setattr(Rounds, "refresh", refresh)


def every_final_counts(patch: pytest.MonkeyPatch) -> None:
    """A collector deletes what it decided itself, though the decision of another stands."""

    def create_round(objects: Any, sealer: Any, round_: int, part: Any, content: StoredRound) -> StoredRound:
        objects.create(round_name(round_, part), encode_round(sealer, round_, part, content))
        return content

    patch.setattr(collector_module, "create_round", create_round)


def entry_before_not_read(patch: pytest.MonkeyPatch) -> None:
    """A writer takes an entry for its own log's end though the log was cut there."""
    patch.setattr(WriterLog, "_stands", lambda self: True)


def bases_not_followed(patch: pytest.MonkeyPatch) -> None:
    """A writer relies on a difference whose base is condemned."""

    def stored(self: RemoteIndex, chunks: Any, bases_left: int) -> set[bytes]:
        usable = self._usable_numbers()
        return {chunk for chunk in chunks if any(usable(place.pack) for place in self.find(chunk))}

    patch.setattr(RemoteIndex, "_stored", stored)


def bases_not_marked(patch: pytest.MonkeyPatch) -> None:
    """A collector does not mark the bases of live chunks."""
    patch.setattr(collector_module, "add_bases", lambda index, live: None)


def manifest_name_reused(patch: pytest.MonkeyPatch) -> None:
    """A writer stores a condemned manifest again under its name."""
    patch.setattr(
        Rounds, "manifests", property(lambda self: frozenset(), lambda self, value: None), raising=False
    )


def next_round_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    """A writer takes a listing of rounds as it comes."""

    def list_all(self: Rounds) -> Any:
        parts = self._list()
        return parts, max(parts, default=self.last)

    patch.setattr(Rounds, "_list_all", list_all)


THE_NINE: dict[str, Patch] = {
    mutation.__name__: mutation
    for mutation in (
        no_hello,
        list_before_hello,
        stale_index,
        unconditional_commit,
        fence_ignored,
        no_fence,
        fence_before_round,
        no_second_list,
        overlapping_rounds,
    )
}
"""Mutations of the model (remote.md)."""

MORE: dict[str, Patch] = {
    mutation.__name__: mutation
    for mutation in (
        every_final_counts,
        entry_before_not_read,
        bases_not_followed,
        bases_not_marked,
        manifest_name_reused,
    )
}

OF_LISTINGS: dict[str, tuple[str, Patch]] = {
    "next_round_not_asked_for": ("gc/", next_round_not_asked_for),
}
"""Mutations that believe a listing that lacks something, with the prefix that is listed."""
