"""Several processes with several threads at once on one mount, while epochs are cut.

The result is that of the same operations one after the other, and an exclusive operation succeeds for exactly
one caller.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import contests
from support.actor import ROOT, Actor
from support.overlay import Overlay, overlay_over
from support.sides import tree

pytestmark = pytest.mark.mount

PROCESSES, THREADS = 3, 2
WORKERS = PROCESSES * THREADS


@pytest.fixture(scope="module")
def overlay(run_dir: Path) -> Iterator[Overlay]:
    run_dir.chmod(0o711)
    # As long as "solitary" below: symlinks with absolute targets must have the same size in both trees.
    root = run_dir / "parallel"
    root.mkdir()
    with overlay_over(root, run_dir / "parallel.sock") as overlay:
        yield overlay


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Actor]]:
    with Actor(ROOT) as one, Actor(ROOT) as two, Actor(ROOT) as three:
        yield [one, two, three]


@pytest.fixture
def place(overlay: Overlay, request: pytest.FixtureRequest) -> Path:
    """Return an empty directory on the mount, writable by everyone."""
    path = overlay.root / request.node.name
    path.mkdir()
    path.chmod(0o777)
    return path


@contextmanager
def _cutting(overlay: Overlay) -> Iterator[None]:
    """Cut and commit epochs for as long as the block runs."""
    end = threading.Event()

    def cut() -> None:
        while not end.wait(0.03):
            overlay.client.committed(overlay.client.cut().epoch)

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        yield
    finally:
        end.set()
        cutter.join()


def _run_on_all(
    actors: list[Actor], function: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]]
) -> list[Any]:
    for number, actor in enumerate(actors):
        actor.start_call(function, *arguments(number))
    return [actor.result() for actor in actors]


def test_histories_side_by_side(overlay: Overlay, actors: list[Actor], place: Path, run_dir: Path) -> None:
    """Six random histories run at once leave the trees of serial runs on a plain directory."""
    seed, steps = 11, 1500
    with _cutting(overlay):
        assert (
            _run_on_all(
                actors, contests.histories, lambda n: (os.fspath(place), f"p{n}", THREADS, seed, steps)
            )
            == [None] * PROCESSES
        )
    # As long as the other path: symbolic links name it.
    plain = run_dir / "solitary" / place.name
    plain.mkdir(parents=True)
    plain.chmod(0o777)
    for number in range(PROCESSES):
        contests.histories(os.fspath(plain), f"p{number}", THREADS, seed, steps)
    expected = _below(plain, plain)
    assert len(expected) > 3 * WORKERS
    assert _below(place, place) == expected
    assert _below(overlay.backing / place.name, place) == expected


def _below(top: Path, named: Path) -> dict[str, Any]:
    """Return the tree, with symbolic link targets relative to the directory under the name that was used."""
    return {
        name: (
            attributes,
            content.replace(os.fspath(named), "") if isinstance(content, str) else content,
            *rest,
        )
        for name, (attributes, content, *rest) in tree(os.fspath(top)).items()
    }


def test_concurrent_appends_are_whole_and_in_order(
    overlay: Overlay, actors: list[Actor], place: Path
) -> None:
    """Records appended with O_APPEND by six threads in three processes are whole, single and in order."""
    count = 300
    with _cutting(overlay):
        assert (
            _run_on_all(actors, contests.appends, lambda n: (os.fspath(place), f"p{n}", THREADS, count))
            == [None] * 3
        )
    data = (place / "log").read_bytes()
    size = contests.RECORD_BYTES
    assert len(data) == WORKERS * count * size
    seen: dict[tuple[bytes, bytes], int] = {}
    for at in range(0, len(data), size):
        process, thread, number, rest = data[at : at + size].split(b" ")
        assert rest.strip(b".") == b"\n"
        assert seen.get((process, thread), 0) == int(number)
        seen[process, thread] = int(number) + 1
    assert set(seen.values()) == {count}
    assert (overlay.backing / place.name / "log").read_bytes() == data


@pytest.mark.parametrize("how", ["flock", "lockf", "file"])
def test_locks_exclude(overlay: Overlay, actors: list[Actor], place: Path, how: str) -> None:
    """A number in a file, read and written by all under a lock, counts every step."""
    threads, count = (1 if how == "lockf" else THREADS), 60
    assert (
        _run_on_all(actors, contests.counting, lambda _: (os.fspath(place), how, threads, count))
        == [None] * 3
    )
    assert int((place / "number").read_text()) == PROCESSES * threads * count


def test_stores_in_a_mapping_that_all_share(overlay: Overlay, actors: list[Actor], place: Path) -> None:
    """Stores of several writers to neighbouring bytes of a shared page are all kept while epochs are cut."""
    count = 20_000
    (place / "shared").write_bytes(bytes(2 * 4096))
    with _cutting(overlay):
        assert (
            _run_on_all(actors, contests.stores, lambda n: (os.fspath(place), n * THREADS, THREADS, count))
            == [None] * 3
        )
    for data in ((place / "shared").read_bytes(), (overlay.backing / place.name / "shared").read_bytes()):
        slots = [data[at : at + 8] for at in range(0, WORKERS * contests.SLOT_BYTES, contests.SLOT_BYTES)]
        assert slots == [b"%08d" % count] * WORKERS


def test_exactly_one_of_simultaneous_calls_succeeds(
    overlay: Overlay, actors: list[Actor], place: Path
) -> None:
    """Exactly one of six simultaneous calls succeeds.

    O_EXCL, mkdir, symlink, link, unlink, rmdir, rename and RENAME_NOREPLACE.
    """
    rounds = 12
    for kind in contests.RACES:
        for i in range(rounds):
            arena = place / f"{kind}-{i}"
            (arena / "folder").mkdir(parents=True)
            (arena / "there").touch()
            if kind == "noreplace":
                for worker in range(WORKERS):
                    (arena / f"own-p{worker // THREADS}-{worker % THREADS}").touch()
    with _cutting(overlay):
        won = _run_on_all(actors, contests.races, lambda n: (os.fspath(place), f"p{n}", THREADS, rounds))
    assert all(isinstance(each, list) for each in won), won
    assert sorted(one for each in won for one in each) == sorted(
        (kind, i) for kind in contests.RACES for i in range(rounds)
    )
