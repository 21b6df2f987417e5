"""Tests of the simulated fleet: the model of the store, time in pools of threads, and that the figures are lines."""

from __future__ import annotations

import datetime

import pytest

from benchmarks.fleet import questions
from benchmarks.fleet.page import page
from benchmarks.fleet.store import (
    PAGE,
    PUTS_A_SECOND,
    SPLIT_SECONDS,
    Clock,
    Partitions,
    SimulatedStore,
    simulated_pool,
)


def test_a_partition_refuses_what_is_too_much_until_it_is_divided() -> None:
    """One second takes so many requests; what stays busy for minutes is divided at the next character."""
    partitions = Partitions()
    names = [f"packs/data/{number % 256:02x}/{number:032x}" for number in range(PUTS_A_SECOND + 1)]
    assert [partitions.take("PUT", name, 0.5) for name in names] == [True] * PUTS_A_SECOND + [False]
    assert partitions.take("GET", names[0], 0.5)
    for second in range(1, SPLIT_SECONDS + 1):
        for name in names:
            partitions.take("PUT", name, second)
    assert partitions.count > 1
    assert all(partitions.take("PUT", name, SPLIT_SECONDS + 1) for name in names[:3000])


def test_pool_of_threads_takes_the_time_of_its_longest_thread() -> None:
    """Eight calls of a second in four threads take two, and a nested result is waited for."""
    clock = Clock()
    begun: list[float] = []

    def work(seconds: float) -> float:
        begun.append(clock.now)
        clock.now += seconds
        return seconds

    with simulated_pool(clock)(4) as pool:
        assert list(pool.map(work, [1.0] * 8)) == [1.0] * 8
    assert clock.now == 2.0
    assert begun == [0.0] * 4 + [1.0] * 4


def test_listing_is_a_request_for_each_page() -> None:
    """A thousand names cost one LIST."""
    store = SimulatedStore(Clock())
    for number in range(PAGE + 1):
        store.put(f"w/{number:05d}", [b""])
    before = store.clock.now
    assert len(list(store.list("w/"))) == PAGE + 1
    assert store.requests["LIST"] == 2
    assert store.clock.now > before


@pytest.fixture(scope="module")
def runs() -> list[questions.Measured]:
    return [questions.measure(hosts) for hosts in (1, 2, 4)]


def test_requests_are_lines_in_the_number_of_hosts(runs: list[questions.Measured]) -> None:
    """What is extrapolated to ten thousand hosts follows a line."""
    for of in (
        lambda run: run.new_host.requests["GET"],
        lambda run: run.collection.requests["GET"],
        lambda run: run.collection.requests["PUT"],
        lambda run: run.status.requests["GET"],
        lambda run: run.own_sum.requests["GET"],
    ):
        assert questions.deviation(runs, of) == 0
    # An upload costs the same beside any number of hosts.
    assert {tuple(sorted(run.upload.requests.items())) for run in runs} == {(("GET", 1), ("PUT", 5))}


def test_page_has_every_answer(runs: list[questions.Measured]) -> None:
    """The page is made of small runs as of large ones."""
    tables = [
        questions.requests_by_interval(runs),
        questions.new_hosts(runs),
        questions.sharing(runs),
        questions.index_sizes(runs, (10, 20)),
        questions.collections(runs),
        questions.prefixes((2,), 5),
        questions.fleet_status(runs),
        questions.dedup_loss((1,)),
    ]
    text = page(tables, datetime.date(2026, 1, 1), (1, 2, 4))
    assert text.count("**Knee") >= 7
    assert all(f"## {table.title}" in text for table in tables)
