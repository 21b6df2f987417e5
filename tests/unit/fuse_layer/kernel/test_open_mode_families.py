"""Tests of families of opens: in whatever order files are opened and released, no open is refused."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.kernel.driver import OpenModes
from ciuic.fuse_layer.state.open_rules import OpenPreference

COEXISTS = {
    ("C", "C"): True, ("C", "P"): False, ("C", "DP"): False,
    ("P", "C"): False, ("P", "P"): True, ("P", "DP"): True,
    ("DP", "C"): False, ("DP", "P"): True, ("DP", "DP"): True,
}  # fmt: skip
"""Measured, see docs/decisions/families-of-opens.md; opens of kind D alone are not made."""


class FakeKernel(OpenModes):
    """Modes with a simulated kernel: backing ids, and the rule of what may be open together."""

    def __init__(self, *, refuses: int = 0) -> None:
        super().__init__(-1, passthrough=True)
        self.refuses = refuses
        self.ids: set[int] = set()
        self._next = 0

    def _ioctl(self, request: int, argument: bytearray) -> int:
        if request == p.DEV_IOC_BACKING_OPEN:
            if self.refuses:
                raise OSError(self.refuses, os.strerror(self.refuses))
            self._next += 1
            self.ids.add(self._next)
            return self._next
        self.ids.remove(p.BACKING_ID.unpack(argument)[0])
        return 0


def kind_of(open_flags: int) -> str:
    if not open_flags & p.FOPEN_PASSTHROUGH:
        return "C"
    return "DP" if open_flags & p.FOPEN_DIRECT_IO else "P"


access = st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
more = st.sampled_from([0, os.O_APPEND, os.O_TRUNC])
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("open"), st.integers(1, 3), access, more, st.booleans(), st.sampled_from(OpenPreference)
        ),
        st.tuples(
            st.just("release"),
            st.integers(0, 9),
            st.just(0),
            st.just(0),
            st.just(False),
            st.just(OpenPreference.ANY),
        ),
    ),
    max_size=40,
)


@given(steps, st.sampled_from([0, 0, 0, errno.EPERM, errno.ELOOP, errno.EOPNOTSUPP]))
def test_incompatible_opens_never_meet(
    todo: list[tuple[str, int, int, int, bool, OpenPreference]], refuses: int
) -> None:
    """An open is never combined with one of its inode that it cannot be open beside.

    Of one inode, C and the passthrough kinds are never open together; each inode of the family has one
    backing id, which is given back with the last release; a writer is unseen exactly where the kernel may
    write or map without the overlay.
    """
    modes = FakeKernel(refuses=refuses)
    opens: list[tuple[int, str]] = []
    for what, number, flags, extra, fresh, wish in todo:
        if what == "release":
            if opens:
                node, _ = opens.pop(number % len(opens))
                modes.released(node)
            continue
        with modes.lock(number):
            plan = modes.plan(number, flags | extra, fresh=fresh, preference=wish)
            final, backing_id = modes.commit(number, plan, -1)
        kind = kind_of(final.open_flags)
        for node, other in opens:
            assert node != number or COEXISTS[other, kind], f"{other} then {kind}"
        opens.append((number, kind))
        assert bool(backing_id) is (kind != "C")
        if kind == "P" and flags != os.O_RDONLY:
            assert final.unseen
            assert fresh
            assert wish is not OpenPreference.TRACKED
            assert not extra & os.O_APPEND
        if wish is OpenPreference.CACHED and all(node != number for node, _ in opens[:-1]):
            assert kind == "C"
        if kind == "DP":
            assert final.unseen is (flags == os.O_RDWR)
        if kind == "C":
            assert not final.unseen
        family = {node for node, other in opens if other != "C"}
        assert len(modes.ids) == len(family)
        assert {node for node in (1, 2, 3) if modes.is_passthrough(node)} == family
    for node, _ in opens:
        modes.released(node)
    assert modes.ids == set()


@pytest.mark.parametrize(
    ("number", "stays"), [(errno.EPERM, False), (errno.ELOOP, False), (errno.EOPNOTSUPP, True)]
)
def test_impossible_passthrough_is_not_tried_again(number: int, stays: bool) -> None:
    """Passthrough is switched off without the right or on stacked file systems, not by a single file."""
    modes = FakeKernel(refuses=number)
    plan, backing_id = modes.commit(1, modes.plan(1, os.O_RDONLY, fresh=False), -1)
    assert (plan.open_flags, backing_id) == (0, 0)
    assert modes.passthrough is stays


def test_a_refusal_for_one_file_does_not_part_what_is_open_of_another() -> None:
    """A file refused on a stacked file system below the root leaves open files of the family in it."""
    modes = FakeKernel()
    modes.commit(1, modes.plan(1, os.O_RDONLY, fresh=False), -1)
    modes.refuses = errno.ELOOP
    assert kind_of(modes.commit(2, modes.plan(2, os.O_RDONLY, fresh=False), -1)[0].open_flags) == "C"
    assert kind_of(modes.plan(1, os.O_RDONLY, fresh=False).open_flags) == "P"
    assert kind_of(modes.plan(1, os.O_RDWR, fresh=False).open_flags) == "DP"
    assert kind_of(modes.plan(3, os.O_RDONLY, fresh=False).open_flags) == "C"


def test_a_release_too_many_is_ignored() -> None:
    """A release of a node without open handles is ignored."""
    FakeKernel().released(5)
