"""Locks of flock, fcntl and open file descriptions between processes, on a mount and a plain directory."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.actor import ALICE, BOB, ROOT, Actor
from support.overlay import Overlay, plain_and_overlay
from support.until import until

pytestmark = pytest.mark.mount

FILES = st.sampled_from(["a", "b"])
FLAGS = st.sampled_from(
    [os.O_RDWR | os.O_CREAT, os.O_RDWR | os.O_CREAT, os.O_RDONLY, os.O_WRONLY | os.O_CREAT]
)
KINDS = st.sampled_from([fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK])
ASKED = st.sampled_from([fcntl.F_RDLCK, fcntl.F_WRLCK])
STARTS = st.sampled_from([0, 1, 10, 50, 4096, 1 << 40])
LENGTHS = st.sampled_from([0, 1, 5, 100, 1 << 20])
SLOT = st.integers(0, 2)


class Op(NamedTuple):
    """Operation of one process."""

    actor: int
    what: str
    args: tuple[Any, ...]


def _op(what: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Op]:
    return st.builds(Op, st.integers(0, 2), st.just(what), st.tuples(*args))


OPS = st.one_of(
    _op("open", FILES, FLAGS, st.just(0o666), SLOT),
    _op("open", FILES, FLAGS, st.just(0o666), SLOT),
    _op("close", SLOT),
    _op("flock", SLOT, st.sampled_from([fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN])),
    _op("lock", SLOT, KINDS, STARTS, LENGTHS, st.booleans()),
    _op("lock", SLOT, KINDS, STARTS, LENGTHS, st.booleans()),
    _op("getlock", SLOT, ASKED, STARTS, LENGTHS, st.booleans()),
    _op("unlink", FILES),
    _op("rename", FILES, FILES, st.just(0)),
    _op("write", SLOT, st.just(b"written")),
)


@pytest.fixture(scope="module")
def sides(run_dir: Path) -> Iterator[tuple[Path, Overlay]]:
    with plain_and_overlay(run_dir, "locks") as both:
        yield both


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Actor]]:
    with Actor(ROOT) as one, Actor(ALICE) as two, Actor(BOB) as three:
        yield [one, two, three]


_case = iter(range(1 << 30))


def _tops(sides: tuple[Path, Overlay]) -> list[Path]:
    case = str(next(_case))
    tops = [sides[0] / case, sides[1].root / case]
    for top in tops:
        top.mkdir()
        top.chmod(0o777)
    return tops


@given(ops=st.lists(OPS, min_size=5, max_size=60))
def test_locks_are_granted_and_refused_alike(
    sides: tuple[Path, Overlay], actors: list[Actor], ops: list[Op]
) -> None:
    """Locks are granted, refused, reported by F_GETLK and released by close as on plain files."""
    tops = _tops(sides)
    try:
        for step, op in enumerate(ops):
            expected, found = (actors[op.actor].do(top, op.what, op.args, umask=0) for top in tops)
            assert found == expected, f"step {step}: {op}"
    finally:
        for actor in actors:
            actor.close_all()


def _wait_until_waiting(actor: Actor) -> None:
    """Wait until the kernel lists the process among those that wait for a lock (proc_locks(5))."""

    def waits() -> bool:
        waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line)
        return any(fields[5] == str(actor.pid) for fields in waiting)

    until("a process that waits for a lock", waits)


def test_a_lock_that_is_waited_for(sides: tuple[Path, Overlay], actors: list[Actor]) -> None:
    """A waiting process gets the lock when its holder releases it or dies; a deadlock gives one EDEADLK."""
    whole_file = (fcntl.F_WRLCK, 0, 0)
    for top in _tops(sides):
        one, two = actors[1], actors[2]
        for actor in (one, two):
            assert actor.do(top, "open", ("a", os.O_RDWR | os.O_CREAT, 0o666, 0), umask=0)[0] == "done"
        assert one.do(top, "lock", (0, *whole_file, False)) == ("done", None)
        two.start(top, "lock_waiting", (0, *whole_file))
        _wait_until_waiting(two)
        assert one.do(top, "lock", (0, fcntl.F_UNLCK, 0, 0, False)) == ("done", None)
        assert two.result() == ("done", None)

        # Process two holds byte 0 and more; let it keep bytes 0 to 9 and one bytes 10 to 19, and each want
        # the other's.
        assert two.do(top, "lock", (0, fcntl.F_UNLCK, 10, 0, False)) == ("done", None)
        assert one.do(top, "lock", (0, fcntl.F_WRLCK, 10, 10, False)) == ("done", None)
        one.start(top, "lock_waiting", (0, fcntl.F_WRLCK, 0, 10))
        _wait_until_waiting(one)
        assert two.do(top, "lock_waiting", (0, fcntl.F_WRLCK, 10, 10)) == (
            "refused",
            errno.errorcode[errno.EDEADLK],
        )
        two.close_all()
        assert one.result() == ("done", None)

        with Actor(ALICE) as mortal:
            mortal.do(top, "open", ("b", os.O_RDWR | os.O_CREAT, 0o666, 0), umask=0)
            assert mortal.do(top, "lock", (0, *whole_file, False)) == ("done", None)
            assert one.do(top, "open", ("b", os.O_RDWR, 0, 1))[0] == "done"
            one.start(top, "lock_waiting", (1, *whole_file))
            _wait_until_waiting(one)
            mortal.kill(signal.SIGKILL)
            assert one.result() == ("done", None)
        one.close_all()
