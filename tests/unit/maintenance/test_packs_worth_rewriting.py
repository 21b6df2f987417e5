"""Tests of which packs are worth rewriting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ciuic.maintenance.sweep import HURRIED, PackUse, Thresholds, worth_rewriting

MIB = 1 << 20
packs = st.lists(
    st.tuples(st.sampled_from(["data", "meta"]), st.integers(1, 300), st.floats(0, 1)), max_size=40
).map(
    lambda made: [
        PackUse(
            number,
            kind,
            mib * MIB,
            int(mib * MIB * share),
            0 if share == 0 else 5,
            int(mib * MIB * (1 - share)),
        )
        for number, (kind, mib, share) in enumerate(made)
    ]
)


def use(number: int, mib: int, live_share: float, kind: str = "data") -> PackUse:
    size = mib * MIB
    return PackUse(number, kind, size, int(size * live_share), 1, size - int(size * live_share))


@given(packs)
def test_enough_and_not_more(uses: list[PackUse]) -> None:
    """Garbage is left only in packs that are nearly all alive, and no pack is rewritten in vain."""
    thresholds = Thresholds()
    chosen = worth_rewriting(uses, thresholds)
    numbers = {use.number for use in chosen}
    assert len(numbers) == len(chosen)
    assert all(use.live_chunks for use in chosen)
    alive = [use for use in uses if use.live_chunks]
    left = [use for use in alive if use.number not in numbers]
    garbage_bytes = sum(use.dead_bytes for use in left)
    allowed_bytes = thresholds.unused_share * sum(use.live_bytes + use.dead_bytes for use in alive)
    assert garbage_bytes <= allowed_bytes or all(use.dead_share < thresholds.pack_dead_share for use in left)


def test_packs_that_free_most_come_first() -> None:
    """Packs that free most for the least copying come first, and the rest may stay with little garbage."""
    uses = [use(1, 100, 0.99), use(2, 100, 0.1), use(3, 100, 0.6), use(4, 100, 0.97)]
    assert [u.number for u in worth_rewriting(uses, Thresholds())] == [2, 3]
    assert [u.number for u in worth_rewriting(uses, Thresholds(unused_share=0.2))] == [2]


def test_in_a_hurry_almost_any_garbage_counts() -> None:
    """Short of space, packs with a few percent of garbage are rewritten as well."""
    assert [u.number for u in worth_rewriting([use(1, 100, 0.95), use(2, 100, 0.99)], HURRIED)] == [1]


def test_a_healthy_repository_is_left_alone() -> None:
    """A repository without garbage has no pack chosen."""
    assert worth_rewriting([use(n, 256, 1.0) for n in range(50)], Thresholds()) == []


def test_hundreds_of_small_packs_are_merged() -> None:
    """Hundreds of small packs, one a snapshot, are merged; a few are not worth it."""
    few = [use(n, 1, 1.0, "meta") for n in range(20)]
    many = [use(n, 1, 1.0, "meta") for n in range(200)]
    assert worth_rewriting(few, Thresholds()) == []
    assert len(worth_rewriting(many, Thresholds())) == 200


def test_the_pack_being_filled_comes_first() -> None:
    """The pack being filled comes first, or what is copied into it would be copied a second time."""
    filling = PackUse(9, "data", 100 * MIB, 50 * MIB, 1, 50 * MIB, sealed=False)
    assert [u.number for u in worth_rewriting([use(1, 100, 0.1), filling], Thresholds())] == [9, 1]


def test_an_empty_pack_that_is_being_filled_is_not_dead() -> None:
    """An empty pack is dropped only if it is sealed, not while it is being filled."""
    assert not PackUse(1, "data", 4096, 0, 0, 0, sealed=False).dead
    assert PackUse(1, "data", 4096, 0, 0, 0, sealed=True).dead
    assert PackUse(1, "data", 9000, 0, 0, 10, sealed=False).dead
