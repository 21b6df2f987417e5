"""Several processes with several threads at once on one mount, while epochs are cut.

The result is that of the same operations one after the other, and an exclusive operation succeeds for exactly
one caller.

Contests are run by actors and judged by the test: each runs ``threads`` threads in one directory and returns what each of them did.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.actor import ROOT, Actor
from support.core_driver import FOLDERS, NAMES, Operation
from support.mount_driver import KINDS, MountDriver
from support.overlay import Overlay, overlay_over
from support.sides import tree

from ciuic.fuse_layer.system import syscalls

RECORD_BYTES = 64
SLOT_BYTES = 64
"""Bytes of each thread in a mapping that all share: less than a page, so that pages are shared too."""
_AT_FDCWD = -100
T = TypeVar("T")


def _at_once(threads: int, work: Callable[[int], T]) -> list[T]:
    results: list[Any] = [None] * threads
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=one, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return results


def histories(top: str, name: str, threads: int, seed: int, steps: int) -> None:
    """Carry out random operations, decided by the seed, in one directory for each thread below ``top``."""

    def work(number: int) -> None:
        folder = f"{top}/{name}-{number}"
        os.mkdir(folder)
        rng = random.Random(f"{seed} {name} {number}")
        driver = MountDriver(Path(folder), 4096)
        driver.furnish()
        count = len(FOLDERS) * len(NAMES)
        for _ in range(steps):
            operation: Operation = (
                rng.choice(KINDS),
                rng.randrange(count),
                rng.randrange(count),
                rng.randrange(8),
            )
            driver.do(operation)
        driver.close_all()

    _at_once(threads, work)


def appends(top: str, name: str, threads: int, count: int) -> None:
    """Append numbered records of RECORD_BYTES to one log with O_APPEND."""

    def work(number: int) -> None:
        fd = os.open(f"{top}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            for i in range(count):
                record = f"{name} {number} {i} ".encode().ljust(RECORD_BYTES - 1, b".") + b"\n"
                assert os.write(fd, record) == RECORD_BYTES
        finally:
            os.close(fd)

    _at_once(threads, work)


def counting(top: str, how: str, threads: int, count: int) -> None:
    """Add 1 to a number in a file ``count`` times in each thread, under a lock of the kind ``how``."""

    def work(_number: int) -> None:
        fd = os.open(f"{top}/number", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            for _ in range(count):
                with _locked(top, fd, how):
                    value = int(os.pread(fd, 20, 0) or b"0")
                    os.pwrite(fd, b"%020d" % (value + 1), 0)
        finally:
            os.close(fd)

    _at_once(threads, work)


@contextlib.contextmanager
def _locked(top: str, fd: int, how: str) -> Any:
    if how == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)
    elif how == "lockf":
        # Locks of processes: threads of one process would not exclude each other.
        fcntl.lockf(fd, fcntl.LOCK_EX)
        yield
        fcntl.lockf(fd, fcntl.LOCK_UN)
    else:
        while True:
            try:
                os.close(os.open(f"{top}/lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                break
            except FileExistsError:
                continue
        yield
        os.unlink(f"{top}/lock")


def stores(top: str, first: int, threads: int, count: int) -> None:
    """Store ``count`` numbers one after the other in each thread's own slot of a shared mapping."""

    def work(number: int) -> None:
        fd = os.open(f"{top}/shared", os.O_RDWR)
        at = (first + number) * SLOT_BYTES
        with mmap.mmap(fd, 0) as mapping:
            os.close(fd)
            for i in range(count):
                mapping[at : at + 8] = b"%08d" % (i + 1)
            mapping.flush()

    _at_once(threads, work)


_RACES: dict[str, Callable[[str, str], Any]] = {
    "create": lambda place, _: os.close(os.open(f"{place}/one", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
    "mkdir": lambda place, _: os.mkdir(f"{place}/one"),
    "symlink": lambda place, _: os.symlink("nowhere", f"{place}/one"),
    "link": lambda place, _: os.link(f"{place}/there", f"{place}/one"),
    "unlink": lambda place, _: os.unlink(f"{place}/there"),
    "rmdir": lambda place, _: os.rmdir(f"{place}/folder"),
    "rename": lambda place, me: os.rename(f"{place}/there", f"{place}/{me}"),
    "noreplace": lambda place, me: syscalls.renameat2(
        _AT_FDCWD,
        os.fsencode(f"{place}/own-{me}"),
        _AT_FDCWD,
        os.fsencode(f"{place}/one"),
        syscalls.RENAME_NOREPLACE,
    ),
}
RACES = tuple(_RACES)
_LOST = (errno.EEXIST, errno.ENOENT)


def races(top: str, name: str, threads: int, rounds: int) -> list[tuple[str, int]]:
    """Return each race (kind, number) that a thread of this process won. The test makes the directories."""

    def work(number: int) -> list[tuple[str, int]]:
        won = []
        for kind, race in _RACES.items():
            for i in range(rounds):
                try:
                    race(f"{top}/{kind}-{i}", f"{name}-{number}")
                    won.append((kind, i))
                except OSError as error:
                    if error.errno not in _LOST:
                        raise
        return won

    return [one for each in _at_once(threads, work) for one in each]


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
            _run_on_all(actors, histories, lambda n: (os.fspath(place), f"p{n}", THREADS, seed, steps))
            == [None] * PROCESSES
        )
    # As long as the other path: symbolic links name it.
    plain = run_dir / "solitary" / place.name
    plain.mkdir(parents=True)
    plain.chmod(0o777)
    for number in range(PROCESSES):
        histories(os.fspath(plain), f"p{number}", THREADS, seed, steps)
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
            _run_on_all(actors, appends, lambda n: (os.fspath(place), f"p{n}", THREADS, count)) == [None] * 3
        )
    data = (place / "log").read_bytes()
    size = RECORD_BYTES
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
    assert _run_on_all(actors, counting, lambda _: (os.fspath(place), how, threads, count)) == [None] * 3
    assert int((place / "number").read_text()) == PROCESSES * threads * count


def test_stores_in_a_mapping_that_all_share(overlay: Overlay, actors: list[Actor], place: Path) -> None:
    """Stores of several writers to neighbouring bytes of a shared page are all kept while epochs are cut."""
    count = 20_000
    (place / "shared").write_bytes(bytes(2 * 4096))
    with _cutting(overlay):
        assert (
            _run_on_all(actors, stores, lambda n: (os.fspath(place), n * THREADS, THREADS, count))
            == [None] * 3
        )
    for data in ((place / "shared").read_bytes(), (overlay.backing / place.name / "shared").read_bytes()):
        slots = [data[at : at + 8] for at in range(0, WORKERS * SLOT_BYTES, SLOT_BYTES)]
        assert slots == [b"%08d" % count] * WORKERS


@pytest.mark.full
def test_an_open_that_truncates_beside_writes_leaves_the_size_of_the_file(
    overlay: Overlay, place: Path
) -> None:
    """The size after O_TRUNC and write beside other writes is that of the file below the mount."""

    def write(thread: int) -> None:
        flags, size = (os.O_TRUNC, 5_100) if thread == 0 else (0, 70_000)
        for _ in range(20):
            fd = os.open(place / "file", os.O_WRONLY | os.O_CREAT | flags)
            os.pwrite(fd, b"x" * size, 0)
            os.close(fd)
            os.stat(place / "file")

    below = overlay.backing / place.name / "file"
    for _ in range(100):
        _at_once(3, write)
        assert (place / "file").stat().st_size == len((place / "file").read_bytes()) == below.stat().st_size


def test_exactly_one_of_simultaneous_calls_succeeds(
    overlay: Overlay, actors: list[Actor], place: Path
) -> None:
    """Exactly one of six simultaneous calls succeeds.

    O_EXCL, mkdir, symlink, link, unlink, rmdir, rename and RENAME_NOREPLACE.
    """
    rounds = 12
    for kind in RACES:
        for i in range(rounds):
            arena = place / f"{kind}-{i}"
            (arena / "folder").mkdir(parents=True)
            (arena / "there").touch()
            if kind == "noreplace":
                for worker in range(WORKERS):
                    (arena / f"own-p{worker // THREADS}-{worker % THREADS}").touch()
    with _cutting(overlay):
        won = _run_on_all(actors, races, lambda n: (os.fspath(place), f"p{n}", THREADS, rounds))
    assert all(isinstance(each, list) for each in won), won
    assert sorted(one for each in won for one in each) == sorted(
        (kind, i) for kind in RACES for i in range(rounds)
    )
