"""Directory trees with everything a POSIX file system can hold, and manifests to compare them exactly.

Property tests make random changes to small ones.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

import xxhash
from hypothesis import strategies as st
from support.restoring import write

LONG_NAME = b"n" * 255
ODD_NAMES = (
    b"caf\xe9 latin-1",
    b"two\nlines",
    b"a|b|c",
    b" leading and trailing ",
    b"-rf",
    b"\xff\xfe\x01",
    b"'quoted\" $(name)",
    LONG_NAME,
)
DEPTH = 200
_HOLE_START, _HOLE_END = 1 << 20, 9 << 20


class Facts(NamedTuple):
    """Facts of one name that must come back.

    ``same_inode_as`` is the first path of the inode: hard links compare by it.
    """

    kind: int
    mode: int
    uid: int
    gid: int
    rdev: int
    size_bytes: int
    mtime_ns: int
    digest: str
    target: bytes
    xattrs: tuple[tuple[str, bytes], ...]
    same_inode_as: bytes


Manifest = dict[bytes, Facts]


def manifest(top: Path | bytes, *, directory_times: bool = True) -> Manifest:
    """Return every name at or below ``top`` (b"." is itself) with its facts.

    Follow no link, enter no reserved directory.
    """
    top = os.fsencode(top)
    seen: dict[tuple[int, int], bytes] = {}
    facts: Manifest = {}
    start = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _add(facts, seen, start, b".", b".", directory_times)
        _walk(facts, seen, start, b"", directory_times)
    finally:
        os.close(start)
    return facts


def _walk(
    facts: Manifest, seen: dict[tuple[int, int], bytes], folder: int, prefix: bytes, times: bool
) -> None:
    for name in sorted(os.fsencode(name) for name in os.listdir(folder)):
        if name == b".ciuic-state" and not prefix:
            continue
        path = prefix + name
        if _add(facts, seen, folder, name, path, times):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                _walk(facts, seen, below, path + b"/", times)
            finally:
                os.close(below)


def _add(
    facts: Manifest, seen: dict[tuple[int, int], bytes], folder: int, name: bytes, path: bytes, times: bool
) -> bool:
    """Record one name; return whether it is a directory to walk into."""
    st = os.stat(name, dir_fd=folder, follow_symlinks=False)
    kind = stat.S_IFMT(st.st_mode)
    is_dir = kind == stat.S_IFDIR
    first = path if is_dir else seen.setdefault((st.st_dev, st.st_ino), path)
    here = f"/proc/self/fd/{folder}/".encode() + name
    facts[path] = Facts(
        kind=kind,
        mode=stat.S_IMODE(st.st_mode),
        uid=st.st_uid,
        gid=st.st_gid,
        rdev=st.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
        size_bytes=0 if is_dir else st.st_size,
        mtime_ns=st.st_mtime_ns if times or not is_dir else 0,
        digest=_digest(folder, name) if kind == stat.S_IFREG else "",
        target=os.readlink(name, dir_fd=folder) if kind == stat.S_IFLNK else b"",
        xattrs=tuple(
            sorted((key, os.getxattr(here, key, follow_symlinks=False)) for key in os.listxattr(here, follow_symlinks=False))
        ),
        same_inode_as=first,
    )  # fmt: skip
    return is_dir and name != b"."


def _digest(folder: int, name: bytes) -> str:
    digest = xxhash.xxh3_128()
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def differences(expected: Manifest, found: Manifest, limit: int = 12) -> list[str]:
    """Return one line for each difference, for an assertion's message; empty when equal."""
    lines = []
    for path in sorted(expected.keys() | found.keys()):
        if path not in found:
            lines.append(f"{path!r} is missing")
        elif path not in expected:
            lines.append(f"{path!r} should not be there")
        elif expected[path] != found[path]:
            pairs = zip(Facts._fields, expected[path], found[path], strict=True)
            changed = ", ".join(f"{field}: {was!r} became {now!r}" for field, was, now in pairs if was != now)
            lines.append(f"{path!r}: {changed}")
    return lines[:limit] + ([f"… {len(lines) - limit} more"] if len(lines) > limit else [])


def assert_same(expected: Manifest, found: Manifest) -> None:
    """Fail with a list of the differences."""
    lines = differences(expected, found)
    assert not lines, "\n".join(lines)


def expected_diff(root: Path | bytes, old: Manifest, new: Manifest) -> set[tuple[str, bytes]]:
    """Compute a diff from two manifests; links are compared by target, directories without times."""
    found = set()
    for path in old.keys() | new.keys():
        absolute = os.path.normpath(os.path.join(os.fsencode(root), path))
        before, after = old.get(path), new.get(path)
        if before is None or after is None:
            found.add(("added" if before is None else "removed", absolute))
        elif before.kind != after.kind:
            found.add(("retyped", absolute))
        elif _compared(before) != _compared(after):
            found.add(("changed", absolute))
    return found


def _compared(facts: Facts) -> Facts:
    facts = facts._replace(same_inode_as=b"")
    return facts._replace(mtime_ns=0) if facts.kind == stat.S_IFDIR else facts


def allocated_bytes(path: Path) -> int:
    """Return the bytes that the file takes on disk."""
    return path.stat().st_blocks * 512


def make_everything(top: Path, seed: int = 1) -> None:
    """Fill ``top`` (an existing directory) with every kind of entry that a snapshot must bring back.

    Needs root.
    """
    rng = random.Random(seed)
    base = os.fsencode(top)
    for name, size in ((b"empty", 0), (b"one byte", 1), (b"block", 262144), (b"odd size", 1_000_003)):
        _write(base + b"/" + name, rng.randbytes(size))
    for number, name in enumerate(ODD_NAMES):
        _write(base + b"/" + name, f"content {number}".encode())
    _write(base + b"/modes", b"#!/bin/sh\n")
    os.chown(base + b"/modes", 1234, 5678)
    os.chmod(base + b"/modes", 0o6751)
    _special_files(base)
    _sparse(base + b"/sparse")
    _write(base + b"/first name", b"several names")
    os.mkdir(base + b"/folder", 0o2755)
    os.chown(base + b"/folder", 10, 20)
    os.chmod(base + b"/folder", 0o3775)
    os.link(base + b"/first name", base + b"/folder/second name")
    os.mkdir(base + b"/empty folder", 0o700)
    os.setxattr(base + b"/block", "user.note", b"\x00binary\xff")
    os.setxattr(base + b"/folder", "user.on-a-folder", b"yes")
    os.setxattr(base + b"/modes", "trusted.ciuic-test", b"root only")
    subprocess.run(["setfacl", "-m", "u:1234:rw-,g:5678:r--", top / "odd size"], check=True, timeout=30)
    subprocess.run(["setfacl", "-d", "-m", "u:1234:rwx", top / "folder"], check=True, timeout=30)
    make_deep(top)
    _set_times(base, rng)


def _special_files(base: bytes) -> None:
    os.symlink(b"target that does not exist", base + b"/dangling")
    os.symlink(b"../folder", base + b"/relative link")
    os.symlink(b"x" * 1000, base + b"/long target")
    os.lchown(base + b"/dangling", 7, 8)
    os.mkfifo(base + b"/fifo", 0o640)
    os.mknod(base + b"/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(base + b"/blockdev", stat.S_IFBLK | 0o600, os.makedev(7, 200))
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{folder}/socket")
        finally:
            os.close(folder)


def make_deep(top: Path, depth: int = DEPTH) -> None:
    """Make a path of ``depth`` components below ``top``, with a file at its end."""
    folder = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for level in range(depth):
        name = f"level-{level:03d}"
        os.mkdir(name, 0o755, dir_fd=folder)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        os.close(folder)
        folder = below
    with open(os.open("the end", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder), "wb") as file:
        file.write(b"deep")
    os.close(folder)


def _write(path: bytes, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _sparse(path: bytes) -> None:
    with open(path, "wb") as file:
        file.write(b"begin" * 1000)
        file.seek(_HOLE_END)
        file.write(b"end" * 1000)
        file.truncate(_HOLE_END + _HOLE_START)


def _set_times(base: bytes, rng: random.Random) -> None:
    """Give every name a time of its own, to the nanosecond; folders last, innermost first."""
    for folder, folders, files in os.walk(base, topdown=False):
        for name in sorted(files + folders):
            stamp = rng.randrange(10**18, 16 * 10**17)
            os.utime(folder + b"/" + name, ns=(stamp, stamp), follow_symlinks=False)
    os.utime(base, ns=(1_600_000_000_123_456_789, 1_600_000_000_987_654_321))


NAMES = ("a", "b", "c/d", "c/e/f", "g/h", "c", "g", "i")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(NAMES), st.binary(max_size=12_000)),
        st.tuples(st.just("overwrite"), st.sampled_from(NAMES), st.integers(0, 9000)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES), st.none()),
        st.tuples(st.just("mkdir"), st.sampled_from(NAMES), st.none()),
        st.tuples(st.just("symlink"), st.sampled_from(NAMES), st.sampled_from(("x", "y"))),
        st.tuples(st.just("link"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
        st.tuples(st.just("chmod"), st.sampled_from(NAMES), st.sampled_from((0o600, 0o755))),
        st.tuples(st.just("xattr"), st.sampled_from(NAMES), st.sampled_from((b"1", b"2"))),
        st.tuples(st.just("utime"), st.sampled_from(NAMES), st.integers(1, 10**18)),
    ),
    max_size=12,
)


def play(root: Path, steps: list[tuple[str, str, object]]) -> None:
    """Carry out the steps that are possible."""
    for what, name, argument in steps:
        path = root / name
        try:
            if what == "write":
                write(path, argument)  # type: ignore[arg-type]
            elif what == "overwrite":
                with open(path, "r+b") as file:
                    file.seek(argument)  # type: ignore[arg-type]
                    file.write(b"over")
            elif what == "remove":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            elif what == "mkdir":
                path.mkdir(parents=True)
            elif what == "symlink":
                path.symlink_to(str(argument))
            elif what == "link":
                os.link(root / str(argument), path, follow_symlinks=False)
            elif what == "chmod":
                os.chmod(path, argument)  # type: ignore[arg-type]
            elif what == "xattr":
                os.setxattr(path, "user.x", argument)  # type: ignore[arg-type]
            else:
                os.utime(path, ns=(1, argument))  # type: ignore[arg-type]
        except OSError:
            # The random step does not fit the existing files.
            continue
