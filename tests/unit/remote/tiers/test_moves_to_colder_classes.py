"""Moves to colder storage classes: the right packs, readable structure, no move that a collection cannot meet."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.archiving_objects import AT_ONCE, ArchivingClasses, World, make_world
from support.dying_objects import DyingObjects, Killed
from support.remote_host import BLOCK, reading
from support.restoring import write

from ciuic.config import TierRule
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.object_names import pack_name
from ciuic.remote.objects.memory_objects import forget_bucket
from ciuic.remote.objects.storage_classes import ListedClass
from ciuic.remote.remote_index import cold_packs
from ciuic.remote.upkeep.cold_packs import apply_rules
from ciuic.remote.upkeep.collect import collect_remote, give_up_snapshots, resolve_snapshots
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.writer_log import LogUpkeep, WriterLog, WriterState

COLLECT_AT_ONCE = CollectionPolicy(young_ns=0, repack_share=0.6)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    name = f"tiers-{os.urandom(6).hex()}"
    yield make_world(tmp_path / "host", name)
    forget_bucket(name)


def test_old_packs_become_cold_and_nothing_else(world: World, tmp_path: Path) -> None:
    """Data packs that only the older snapshot needs are archived, each with a copy of its table; a second run does nothing."""
    packs = world.names("packs/data/")
    moved = world.move(tmp_path / "cache")
    cold = {pack_name(ref) for ref in moved.moves}
    assert cold
    assert cold < packs
    assert moved.skipped == {}
    assert world.store.classes == dict.fromkeys(cold, "GLACIER")
    assert {pack_name(ref) for ref in cold_packs(world.memory)} == cold
    assert world.move(tmp_path / "cache").moves == {}
    assert world.move(tmp_path / "another cache").moves == {}
    # As on Azure, where a thaw changes the class.
    world.store.kept_warm = set(cold)
    world.store.classes = {}
    assert world.move(tmp_path / "cache").moves == {}


def test_packs_that_are_read_at_once_stay_warm(world: World, tmp_path: Path) -> None:
    """A rule that is not colder than the class in which packs were stored, such as STANDARD_IA, makes none of them cold."""
    packs = world.names("packs/data/")
    world.store.classes = dict.fromkeys(packs, "STANDARD_IA")
    moved = world.move(
        tmp_path / "cache", TierRule(after_seconds=0, storage_class="ONEZONE_IA", keep_newest=1)
    )
    assert (moved.moves, moved.tableless) == ({}, ())
    assert cold_packs(world.memory) == {}


def test_cold_packs_leave_everything_but_their_content_readable(world: World, tmp_path: Path) -> None:
    """From the bucket alone both snapshots are listed and their structure verifies; the younger one verifies with every byte."""
    moved = world.move(tmp_path / "cache")
    with reading(world.remote, tmp_path / "fresh") as opened:
        assert set(opened.snapshots.ids()) == {world.first, world.second}
        (repository,) = opened.repositories
        assert verify_snapshots(repository).damages == []
        everything = verify_snapshots(repository, checksum=True)
        assert everything.damages == []
        assert opened.readers[0].archived == {pack_name(ref) for ref in moved.moves}
        assert opened.readers[0].lookup.unreadable() == {}


def test_a_new_snapshot_may_rely_on_cold_packs_and_they_stay_cold(world: World, tmp_path: Path) -> None:
    """A snapshot whose content is in cold packs sends none of it again, and the next run moves nothing back."""
    moved = world.move(tmp_path / "cache")
    before = world.names("packs/data/")
    rng = random.Random(7)
    write(world.host.root / "kept", rng.randbytes(9 * BLOCK))
    again = world.host.snapshot()
    world.host.upload()
    assert world.names("packs/data/") == before
    assert world.move(tmp_path / "cache").moves == {}
    assert set(world.store.classes.values()) == {"GLACIER"}
    with reading(world.remote, tmp_path / "fresh") as opened:
        assert again.id in opened.snapshots.ids()
        assert verify_snapshots(opened.repositories[0]).damages == []
    assert moved.moves


def test_a_collection_deletes_dead_cold_packs_with_their_tables_and_copies_none(
    world: World, tmp_path: Path
) -> None:
    """Once the old snapshot is given up its cold packs go; while they are spared they stay, and they are never repacked."""
    world.move(tmp_path / "cache")
    cold = cold_packs(world.memory)
    with reading(world.remote, tmp_path / "cache") as opened:
        give_up_snapshots(opened, resolve_snapshots(opened, [world.first]), host="operator")
    spared = COLLECT_AT_ONCE._replace(cold=cold, spare_cold_ns=3600 * 10**9)
    with reading(world.remote, tmp_path / "cache") as opened:
        (kept,) = collect_remote(opened, host="operator", policy=spared)
    assert not set(kept.packs) & cold.keys()
    with reading(world.remote, tmp_path / "cache") as opened:
        (done,) = collect_remote(opened, host="operator", policy=COLLECT_AT_ONCE._replace(cold=cold))
    assert set(cold) <= set(done.packs)
    assert world.names("tables/") == set()
    assert not world.names("packs/data/") & set(map(pack_name, cold))
    with reading(world.remote, tmp_path / "fresh") as opened:
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []


@pytest.mark.parametrize("step", [3])
def test_a_mover_that_is_killed_at_any_request_is_continued(tmp_path: Path, step: int) -> None:
    """After a kill at any request everything verifies, a collection harms nothing, and the next run ends the move."""
    at = 0
    while True:
        world = make_world(tmp_path / f"host-{at}", f"killed-{os.urandom(6).hex()}")
        try:
            world.move(tmp_path / f"cache-{at}", objects=DyingObjects(world.memory, at))
        except Killed:
            ended = False
        else:
            ended = True
        with reading(world.remote, tmp_path / f"other-{at}") as opened:
            assert verify_snapshots(opened.repositories[0]).damages == []
            collect_remote(opened, host="other", policy=COLLECT_AT_ONCE)
        world.move(tmp_path / f"cache-{at}")
        assert world.store.classes
        logs = LogReader(world.memory, world.remote.sealer)
        logs.refresh()
        assert logs.moving() == frozenset()
        with reading(world.remote, tmp_path / f"other-{at}") as opened:
            assert verify_snapshots(opened.repositories[0], checksum=True).damages == []
        if ended:
            return
        at += step


def test_a_collection_spares_what_moves(world: World, tmp_path: Path) -> None:
    """A collection whose fence follows the entry of a mover leaves its packs, whose snapshot is given up meanwhile."""
    packs_before = world.names("packs/data/")

    class Paused(ArchivingClasses):
        """Classes that let a collection run in the middle of the first move."""

        collected = False

        def change(self, name: str, storage_class: str) -> None:
            if not Paused.collected:
                Paused.collected = True
                with reading(world.remote, tmp_path / "collector") as other:
                    give_up_snapshots(other, resolve_snapshots(other, [world.first]), host="collector")
                    collect_remote(other, host="collector", policy=COLLECT_AT_ONCE)
                assert name in world.names("packs/data/")
            super().change(name, storage_class)

    with reading(world.remote, tmp_path / "cache") as opened:
        classes = Paused(world.memory, world.store)
        (moved,) = apply_rules(
            [(opened.readers[0], classes)], [AT_ONCE], time.time_ns() + 10**9, host="operator"
        )
    assert Paused.collected
    assert moved.skipped == {}
    assert {pack_name(ref) for ref in moved.moves} <= world.names("packs/data/")
    # Now that nothing moves any more, they go.
    with reading(world.remote, tmp_path / "collector") as other:
        (done,) = collect_remote(other, host="collector", policy=COLLECT_AT_ONCE)
    assert set(moved.moves) <= set(done.packs)
    assert world.names("packs/data/") < packs_before


def test_a_mover_leaves_out_what_a_collection_condemned_first(world: World, tmp_path: Path) -> None:
    """What a round condemned after the plan and before the mover's entry does not move, and nothing of it comes back."""
    given_up: list[set[str]] = []

    class Overtaken(ArchivingClasses):
        """Classes whose listing, the last request of a plan, is followed by a whole collection."""

        def list(self, prefix: str) -> Iterator[ListedClass]:
            found = list(super().list(prefix))
            with reading(world.remote, tmp_path / "collector") as other:
                give_up_snapshots(other, resolve_snapshots(other, [world.first]), host="collector")
                (done,) = collect_remote(other, host="collector", policy=COLLECT_AT_ONCE)
            given_up.append(set(done.packs))
            return iter(found)

    with reading(world.remote, tmp_path / "cache") as opened:
        classes = Overtaken(world.memory, world.store)
        (moved,) = apply_rules(
            [(opened.readers[0], classes)], [AT_ONCE], time.time_ns() + 10**9, host="operator"
        )
    assert moved.moves == {}
    assert set(moved.skipped) == {ref for ref in given_up[0] if ref[0] == "d"}
    assert set(moved.skipped.values()) == {"a collection deletes it"}
    assert world.names("tables/") == set()
    assert not world.names("packs/data/") & {pack_name(ref) for ref in given_up[0]}
    assert world.store.classes == {}


def test_a_log_that_names_moving_packs_is_not_summed_up(world: World, tmp_path: Path) -> None:
    """The entry that names moving packs outlives the upkeep of logs, until the next one, or until the log is ended."""
    name = f"{tmp_path}/writer"
    log = WriterLog(
        world.memory,
        world.remote.sealer,
        WriterState(name),
        Rounds(world.memory, world.remote.sealer),
        host="mover",
        repository=world.remote.id,
    )
    log.hello()
    packs = ["d" + "0" * 32]
    assert log.move(packs, checked=log.rounds.version)
    logs = LogReader(world.memory, world.remote.sealer)
    upkeep = LogUpkeep(world.memory, world.remote.sealer, logs, max_entries=0)
    upkeep.run(None)
    assert logs.moving() == set(packs)
    assert log.move((), checked=log.rounds.version)
    logs.refresh()
    assert logs.moving() == frozenset()
    assert log.move(packs, checked=log.rounds.version)
    LogUpkeep(world.memory, world.remote.sealer, logs, retire_ns=-1).run(time.time_ns() + 10**9)
    assert logs.logs[log.writer].retired
    assert logs.moving() == frozenset()
