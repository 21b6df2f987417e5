"""Permissions of several users at once, with supplementary groups, on the mount and on a plain directory.

Each user is one process. Results, errnos, attributes, ACLs and contents agree, whatever each user did
before.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.actor import ALICE, BOB, CAROL, NOBODY, ROOT, Actor
from support.overlay import DRIVER, Overlay, plain_and_overlay
from support.sides import tree

from ciuic.fuse_layer.system import syscalls

pytestmark = pytest.mark.mount

USERS = [ROOT, ALICE, BOB, CAROL, NOBODY]
PATHS = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "f", "f/a"])
IDS = st.sampled_from([-1, 0, *(user.uid for user in USERS[1:])])
GROUPS = st.sampled_from([-1, 0, 21001, 21002, 22001, 22002, 65534])
FOLDER_MODES = st.sampled_from([0o755, 0o777, 0o1777, 0o2775, 0o3777, 0o750, 0o711, 0o2070, 0o500])
"""Includes sticky and set-group-id modes."""
FILE_MODES = st.sampled_from([0o644, 0o666, 0o640, 0o060, 0o006, 0o000, 0o2755, 0o4755, 0o6777, 0o664])
"""File modes, none with set-group-id but without group execution (docs/conformance.md)."""
PERMISSIONS = st.integers(0, 7)
ACCESS = st.sampled_from([os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK])
FLAGS = st.sampled_from([os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_WRONLY | os.O_TRUNC])  # fmt: skip
TIMES = st.integers(0, 4 * 10**18)
SLOT = st.integers(0, 2)


class Op(NamedTuple):
    """Operation of one user."""

    user: int
    what: str
    args: tuple[Any, ...]
    umask: int


def _op(what: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Op]:
    umasks = st.sampled_from([0o022, 0, 0o077, 0o002])
    return st.builds(Op, st.integers(0, len(USERS) - 1), st.just(what), st.tuples(*args), umasks)


OPS = st.one_of(
    _op("mkdir", PATHS, FOLDER_MODES),
    _op("mkdir", st.sampled_from(["d", "d/e", "f"]), st.just(0o777)),
    _op("open", PATHS, FLAGS, FILE_MODES, SLOT),
    _op("open", PATHS, FLAGS, FILE_MODES, SLOT),
    _op("mknod", PATHS, st.sampled_from([stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG]), FILE_MODES),
    _op("symlink", st.sampled_from(["a", "d"]), PATHS),
    _op("unlink", PATHS),
    _op("rmdir", PATHS),
    _op("rename", PATHS, PATHS, st.sampled_from([0, 0, 1, 2])),
    _op("link", PATHS, PATHS),
    _op("chmod", PATHS, FOLDER_MODES),
    _op("chmod", PATHS, FILE_MODES),
    _op("fchmod", SLOT, FILE_MODES),
    # A chown(2) of neither id by a stranger is a documented difference (docs/conformance.md).
    _op("chown", PATHS, IDS, GROUPS).filter(lambda op: op.args[1:] != (-1, -1)),
    _op("fchown", SLOT, IDS, GROUPS).filter(lambda op: op.args[1:] != (-1, -1)),
    _op("utime", PATHS, TIMES, TIMES),
    _op("truncate", PATHS, st.sampled_from([0, 5, 5000])),
    _op("pread", SLOT, st.just(100), st.just(0)),
    _op("access", PATHS, ACCESS),
    _op("setxattr", PATHS, st.sampled_from(["user.one", "trusted.two"]), st.binary(max_size=9), st.just(0)),
    _op("removexattr", PATHS, st.just("user.one")),
    _op("getxattr", PATHS, st.sampled_from(["user.one", "trusted.two"])),
    _op("listxattr", PATHS),
    _op(
        *(
            "setacl",
            PATHS,
            st.booleans(),
            PERMISSIONS,
            st.tuples(st.sampled_from([21001, 21002]), PERMISSIONS),
        ),
        *(PERMISSIONS, PERMISSIONS, PERMISSIONS),
    ),
    _op("getacl", PATHS, st.booleans()),
    _op("lstat", PATHS),
    _op("listdir", PATHS),
    _op("whole", PATHS),
)
WRITES = _op("write", SLOT, st.binary(min_size=1, max_size=20))


@pytest.fixture(scope="module")
def sides(run_dir: Path) -> Iterator[tuple[Path, Overlay]]:
    with plain_and_overlay(run_dir, "users") as both:
        yield both


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Actor]]:
    started = [Actor(user) for user in USERS]
    yield started
    for actor in started:
        with actor:
            pass


_case = iter(range(1 << 30))


@given(ops=st.lists(st.one_of(OPS, WRITES), min_size=10, max_size=80))
def test_users_are_let_and_refused_alike(
    sides: tuple[Path, Overlay], actors: list[Actor], ops: list[Op]
) -> None:
    """The rights of five users with overlapping groups are the same on both sides, as are the results."""
    plain, overlay = sides
    case = str(next(_case))
    tops = [plain / case, overlay.root / case]
    for top in tops:
        top.mkdir()
        top.chmod(0o777)
    try:
        for step, op in enumerate(ops):
            # Writing as root keeps set-id bits on a plain file system and loses them here (docs/conformance.md).
            actor = actors[ROOT.uid + 1 if op.what == "write" and op.user == 0 else op.user]
            expected, found = (actor.do(top, op.what, op.args, op.umask) for top in tops)
            assert found == expected, f"step {step}: {op} as {actor.user}"
        assert tree(os.fspath(tops[1])) == tree(os.fspath(tops[0]))
    finally:
        for actor in actors:
            actor.close_all()
    assert tree(os.fspath(overlay.backing / case)) == tree(os.fspath(tops[0]))


def test_an_acl_set_by_an_owner_outside_the_group_clears_setgid(
    sides: tuple[Path, Overlay], actors: list[Actor]
) -> None:
    """A setfacl by an owner outside the file's group clears set-group-id; one by a member does not."""
    plain, overlay = sides
    case = str(next(_case))
    for gid in sorted({*ALICE.groups, *BOB.groups}):
        seen = []
        for top in (plain / case / str(gid), overlay.root / case / str(gid)):
            top.mkdir(parents=True)
            for name, mode in (("file", 0o2771), ("folder", 0o2771)):
                (top / name).mkdir() if name == "folder" else (top / name).touch()
                os.chown(top / name, ALICE.uid, gid)
                (top / name).chmod(mode)
                arguments = (name, False, 7, (BOB.uid, 5), 5, 7, 1)
                assert actors[1].do(top, "setacl", arguments) == ("done", None)
            seen.append(tree(os.fspath(top)))
        assert seen[1] == seen[0]
        bit = stat.S_ISGID if gid in ALICE.groups else 0
        assert seen[1]["file"][0][0] & stat.S_ISGID == bit


def test_chown_of_nothing_takes_set_id_bits_away(sides: tuple[Path, Overlay], actors: list[Actor]) -> None:
    """A chown(2) with -1 for user and group clears the set-id bits of files and not of directories."""
    plain, overlay = sides
    case = str(next(_case))
    for user, actor in zip(USERS[:2], actors[:2], strict=True):
        for mode in (0o4755, 0o2775, 0o6777, 0o755):
            seen = []
            for top in (plain / case / f"{user.uid}-{mode}", overlay.root / case / f"{user.uid}-{mode}"):
                (top / "folder").mkdir(parents=True)
                (top / "file").touch()
                for name in ("file", "folder"):
                    os.chown(top / name, ALICE.uid, ALICE.groups[1])
                    (top / name).chmod(mode)
                seen.append([actor.do(top, "chown", (name, -1, -1)) for name in ("file", "folder")])
                seen[-1].append(tree(os.fspath(top)))
            assert seen[1] == seen[0], f"{user} {mode:o}"


@pytest.mark.skipif(DRIVER == "pyfuse3", reason="it carries no fallocate")
@pytest.mark.parametrize("kind", [0, syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_KEEP_SIZE])
def test_allocating_takes_set_id_bits_as_on_a_plain_file(
    sides: tuple[Path, Overlay], actors: list[Actor], kind: int
) -> None:
    """Allocating keeps set-id bits for root; group members keep set-group-id if the group cannot execute."""
    plain, overlay = sides
    kept = set()
    for user, actor in zip(USERS, actors, strict=True):
        for mode in (0o2666, 0o2676, 0o6767, 0o6766, 0o6777):
            seen = []
            for top in (plain, overlay.root):
                path = top / f"{next(_case)}"
                path.write_bytes(b"x" * 10_000)
                os.chown(path, CAROL.uid, ALICE.groups[1])
                path.chmod(mode)
                assert actor.do(top, "open", (path.name, os.O_RDWR, 0, 0)) == ("done", None)
                assert actor.do(top, "allocate", (0, kind, 0, 4096)) == ("done", None)
                actor.close_all()
                seen.append(stat.S_IMODE(path.stat().st_mode))
            assert seen[1] == seen[0], f"{user}, {mode:o}"
            kept.add((user.uid == 0, bool(seen[1] & stat.S_ISGID)))
    assert kept == {(True, True), (False, True), (False, False)}


def test_a_write_of_a_stranger_takes_set_id_bits_away(
    sides: tuple[Path, Overlay], actors: list[Actor]
) -> None:
    """A write to another user's set-id file succeeds and clears the bits."""
    plain, overlay = sides
    case = str(next(_case))
    for mode in (0o4777, 0o2777, 0o6777):
        seen = []
        for top in (plain / case / f"{mode:o}", overlay.root / case / f"{mode:o}"):
            top.mkdir(parents=True)
            (top / "file").touch()
            (top / "file").chmod(mode)
            bob = actors[2]
            steps = [bob.do(top, "open", ("file", os.O_WRONLY, 0, 0)), bob.do(top, "write", (0, b"x"))]
            seen.append([*steps, bob.do(top, "fstat", (0,)), tree(os.fspath(top))])
            bob.close_all()
        assert seen[1] == seen[0], f"{mode:o}"
        assert seen[1][1] == ("done", 1)
