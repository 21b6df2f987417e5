"""Rules of tiers, over any set of snapshots: what may become cold, and that it never comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ciuic.config import TierRule
from ciuic.remote.object_names import PackRef, new_pack_ref
from ciuic.remote.objects.storage_classes import CLASSES, find_class
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.cold_packs import AgedSnapshot, cold_targets, colder, old_snapshots
from ciuic.repository.model import PackRecord
from ciuic.types import ChunkId

NOW_NS = 10**18
S3 = sorted(CLASSES["s3"])
rules = st.builds(
    TierRule,
    after_seconds=st.integers(0, 100),
    storage_class=st.sampled_from(S3),
    kind=st.sampled_from(["all", "files", "training"]),
    keep_newest=st.integers(0, 3),
)
snapshots = st.lists(
    st.builds(
        AgedSnapshot,
        manifest=st.integers(0, 10**6).map(str),
        host=st.sampled_from("ab"),
        job=st.sampled_from(["files", "run"]),
        time_ns=st.integers(0, 120).map(lambda age: NOW_NS - age * 10**9),
    ),
    unique_by=lambda snapshot: snapshot.manifest,
    max_size=12,
)


@given(rule=rules, found=snapshots)
def test_old_snapshots_are_of_the_age_and_kind_of_the_rule(rule: TierRule, found: list[AgedSnapshot]) -> None:
    """An old snapshot has the age and kind, and is none of the newest of its job; every other one lacks one of these."""
    old = old_snapshots(rule, found, NOW_NS)
    for one in found:
        newer = [
            other
            for other in found
            if (other.host, other.job) == (one.host, one.job)
            and (other.time_ns, other.manifest) > (one.time_ns, one.manifest)
        ]
        fits = rule.kind == "all" or (rule.kind == "files") == (one.job == "files")
        is_old = one.time_ns <= NOW_NS - rule.after_seconds * 10**9
        assert (one.manifest in old) == (fits and is_old and len(newer) >= rule.keep_newest)


CHUNKS = [ChunkId(bytes([number]) * 16) for number in range(8)]
chunk_sets = st.frozensets(st.sampled_from(CHUNKS), max_size=8)


@given(
    packs=st.lists(st.tuples(st.sampled_from(["data", "meta"]), chunk_sets), min_size=1, max_size=6),
    needs=st.lists(chunk_sets, min_size=1, max_size=4),
    chosen=st.lists(rules, min_size=1, max_size=3),
    old=st.lists(st.frozensets(st.integers(0, 3)), min_size=3, max_size=3),
    has=st.lists(st.sampled_from(["", *S3]), min_size=6, max_size=6),
)
def test_no_pack_moves_that_another_snapshot_needs_and_a_second_run_moves_none(
    packs: list[tuple[str, frozenset[ChunkId]]],
    needs: list[frozenset[ChunkId]],
    chosen: list[TierRule],
    old: list[frozenset[int]],
    has: list[str],
) -> None:
    """A pack that moves has data, is needed, by old snapshots of its rule alone, gets colder, and moves once."""
    index = RemoteIndex.open(None)
    content: dict[PackRef, frozenset[ChunkId]] = {}
    for kind, chunks in packs:
        ref = new_pack_ref(kind)  # type: ignore[arg-type]
        content[ref] = chunks
        records = [PackRecord(chunk, 64, 10, 10, 0, 0, b"") for chunk in sorted(chunks)]
        index.add(ref, 1000, records)
    live = set().union(*needs)
    warm = [
        set().union(*(needed for at, needed in enumerate(needs) if at not in old[number]))
        for number in range(len(chosen))
    ]
    targets = cold_targets(index, live, warm, chosen, scheme="s3")
    for ref, rule in targets.items():
        assert ref.startswith("d")
        assert content[ref] & live
        assert any(not content[ref] & kept for kept, one in zip(warm, chosen, strict=True) if one == rule)
    for ref in content.keys() - targets.keys():
        assert ref.startswith("m") or not content[ref] & live or all(content[ref] & kept for kept in warm)
    classes = dict(zip(content, has, strict=False))
    moves = colder(targets, classes, scheme="s3")
    for ref, name in moves.items():
        assert find_class("s3", name).coldness > find_class("s3", classes[ref]).coldness
        assert not find_class("s3", classes[ref]).is_archive
    assert colder(targets, classes | moves, scheme="s3") == {}
    index.close()
