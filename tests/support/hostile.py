"""Hostile repositories: every checksum right, every value as bad as it can be.

Trees, block maps, link tables and snapshot files are written with the real encoders, so that their values
pass all checksums and reach the code that uses them.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from hypothesis import strategies as st

from ciuic.compare.diff import diff_snapshots
from ciuic.errors import CiuicError
from ciuic.maintenance.check import check
from ciuic.maintenance.prune import prune
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository, Writer, snapshot_format
from ciuic.repository.block_maps import encode_map_node
from ciuic.repository.lookup import find
from ciuic.repository.tree_format import NodeRef, encode_inner, encode_leaf, encode_xattrs
from ciuic.restore import Overwrite, execute, plan_restore
from ciuic.types import HOLE, ChunkId, Entry, RootRecord, Snapshot, SnapshotId

BLOCK = 4096
ID = SnapshotId("cs-abcdef")

NUMBERS = st.sampled_from(
    (-1, 0, 1, 4095, 4096, 4097, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
)
NAMES = st.sampled_from(
    (
        b"a",
        b"b",
        b"",
        b".",
        b"..",
        b"/etc/passwd",
        b"../../outside/planted",
        b"x/../../y",
        b"n\x00ul",
        b"\xff\xfe",
        b"n" * 255,
        b"n" * 256,
        b"n" * 5000,
        b".ciuic-state",
        b".ciuic-restore",
        b"link",
        b"12345678",
    )
)
MODES = st.sampled_from(
    [kind | 0o644 for kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK)]
    + [
        0,
        0o644,
        0o070000,
        stat.S_IFCHR | 0o600,
        stat.S_IFREG | 0o6777,
        (1 << 32) - 1,
        1 << 40,
        stat.S_IFREG | 1 << 20,
    ]
)
TARGETS = st.sampled_from((b"", b"a", b"/", b"../..", b"../../outside", b"n\0ul", b"t" * 5000))
XATTRS = st.sampled_from(
    (
        (),
        ((b"user.a", b"b"),),
        ((b"", b""),),
        ((b"n\0ul", b"x"),),
        ((b"user." + b"n" * 300, b"x"),),
        ((b"security.capability", b"rubbish"),),
        ((b"system.posix_acl_access", b"rubbish"),),
        ((b"user.big", b"x" * 70000),),
        ((b"", b"not an id"),),
        ((b"", bytes(16)),),
    )
)
PATHS = st.sampled_from(
    (b"/r", b"/", b"", b"r", b"/r/../../outside", b"/n\0ul", b"/" + b"p" * 5000, b"/r/", b"//r", b"/r\xff")
)


class Crafter:
    """Draw values, and store chunks that contain them."""

    def __init__(self, writer: Writer, draw: Callable[[Any], Any]) -> None:
        self.writer = writer
        self.draw = draw
        self.made: list[bytes] = [b"", bytes(16), b"short", b"no such chunk ever"[:16]]

    def put(self, data: bytes) -> ChunkId:
        chunk = self.writer._put_meta(data)
        self.made.append(chunk)
        return chunk

    def id(self) -> bytes:
        """Draw an id of a chunk of the right kind or of another."""
        return bytes(self.draw(st.sampled_from(self.made)))

    def entry(self, *, name: bytes | None = None) -> Entry:
        """Draw an entry, mostly sensible, with some fields that are not."""
        draw = self.draw
        base = Entry(
            name=draw(NAMES) if name is None else name,
            mode=draw(MODES),
            size_bytes=draw(st.sampled_from((0, 1, 5000, 10 * BLOCK))),
            content=self.id(),
            map_height=draw(st.sampled_from((0, 0, 1, 2))),
            target=draw(TARGETS),
            mtime_ns=10**18,
        )
        for field in draw(st.lists(st.sampled_from(_NUMERIC), max_size=2)):
            base = msgspec.structs.replace(base, **{field: draw(NUMBERS)})
        if draw(st.booleans()):
            base = msgspec.structs.replace(
                base, xattrs=draw(XATTRS), flags=draw(st.sampled_from((0, 1, 2, 4, 7)))
            )
        return base

    def tree(self, depth: int, *, links: bool = False) -> bytes:
        draw = self.draw
        entries = {entry.name: entry for entry in (self.entry() for _ in range(draw(st.integers(1, 4))))}
        if links:
            entries = {
                key: msgspec.structs.replace(entry, name=key)
                for key, entry in zip(_INODES, entries.values(), strict=False)
            }
        if depth and draw(st.booleans()):
            below = self.tree(depth - 1)
            name = draw(NAMES)
            entries[name] = Entry(name=name, mode=stat.S_IFDIR | 0o755, content=below)
        ordered = [entries[name] for name in sorted(entries)]
        if draw(st.integers(0, 9)) == 0:
            ordered.reverse()
        leaf = self.put(encode_leaf(ordered, links))
        if draw(st.integers(0, 4)):
            return leaf
        refs = [
            NodeRef(name, ChunkId(self.id()), 1, draw(NUMBERS)) for name in sorted({draw(NAMES), draw(NAMES)})
        ]
        return self.put(encode_inner(draw(st.integers(0, 12)), refs, links))

    def snapshot(self) -> Snapshot:
        draw = self.draw
        for data in (
            b"data",
            bytes(BLOCK),
            b"x" * 5 * BLOCK,
            b"",
            b"CT",
            b"CTd\x00\x90",
            b"CX\0\0\x90",
            encode_xattrs([(b"n\0", b"")]),
        ):
            self.put(data)
        self.put(encode_map_node(1, [ChunkId(self.id()[:16].ljust(16, b"i")), HOLE, ChunkId(b"i" * 16)]))
        self.put(encode_map_node(2, [ChunkId(self.id()[:16].ljust(16, b"i"))]))
        roots = []
        for _ in range(draw(st.integers(1, 2))):
            tree = self.tree(2)
            links = self.tree(0, links=True) if draw(st.booleans()) else b""
            entry = Entry(name=b"", mode=stat.S_IFDIR | 0o755, content=tree)
            if draw(st.integers(0, 3)) == 0:
                entry = self.entry()
            roots.append(
                RootRecord(path=draw(st.one_of(st.just(b"/r"), PATHS)), entry=entry, links=ChunkId(links))
            )
        return Snapshot(
            id=ID,
            time_ns=draw(st.one_of(st.just(10**18), NUMBERS)),
            host="h",
            roots=tuple(roots),
            size_bytes=draw(NUMBERS),
            files=draw(NUMBERS),
        )


_INODES = [number.to_bytes(8, "big") for number in range(1, 9)]
_NUMERIC = (
    "mode",
    "uid",
    "gid",
    "rdev",
    "ino",
    "size_bytes",
    "mtime_ns",
    "ctime_ns",
    "atime_ns",
    "flags",
    "link",
    "map_height",
    "total_files",
    "total_bytes",
)


def craft(path: Path, draw: Callable[[Any], Any]) -> None:
    """Craft a hostile snapshot in a new repository at ``path``."""
    with Repository.create(path, block_size=BLOCK) as repository:
        with repository.writer() as writer:
            crafter = Crafter(writer, draw)
            snapshot = crafter.snapshot()
            writer.flush()
        with mock.patch.object(snapshot_format, "_problem", return_value=""):
            (path / "snapshots" / ID).write_bytes(snapshot_format.encode_snapshot(snapshot, repository.id))


def use_everything(path: Path, area: Path) -> None:
    """Run everything that reads a repository on this one; allow only CiuicError, and OSError where stated."""
    target = area / "target"
    with Repository.open(path) as repository:
        for use in (_list, _look_up, _verify, _check, _diff, lambda r: _restore(r, target), _prune, _write):
            try:
                use(repository)
            except CiuicError:
                # Refused with a message.
                continue


def _list(repository: Repository) -> None:
    for info in repository.snapshots.list():
        repository.snapshots.resolve(info.id)
    repository.snapshots.unreadable()


def _look_up(repository: Repository) -> None:
    snapshot = repository.snapshots.load(ID)
    for wanted in (b"/r/a", b"/r/b/a", b"/r"):
        try:
            find(repository, snapshot, wanted)
        except CiuicError:
            continue


def _verify(repository: Repository) -> None:
    verify_snapshots(repository, checksum=True)


def _check(repository: Repository) -> None:
    check(repository, read_data=True)
    check(repository, read_data=True, repair=True)


def _diff(repository: Repository) -> None:
    snapshot = repository.snapshots.load(ID)
    empty = Entry(name=b"", mode=stat.S_IFDIR | 0o755)
    roots = tuple(msgspec.structs.replace(root, entry=empty, links=b"") for root in snapshot.roots)
    before = msgspec.structs.replace(snapshot, roots=roots)
    for old, new in ((before, snapshot), (snapshot, before), (snapshot, snapshot)):
        for change in diff_snapshots(repository, old, new):
            assert change.path


def _restore(repository: Repository, target: Path) -> None:
    snapshot = repository.snapshots.load(ID)
    for root in snapshot.roots:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        # Planted by a user with write permission there.
        os.symlink("../outside", target / "link")
        try:
            plan = plan_restore(
                repository, snapshot, [root.path], os.fsencode(target), overwrite=Overwrite.ALWAYS
            )
            execute(plan, dry_run=True)
            execute(plan)
        except CiuicError:
            continue


def _prune(repository: Repository) -> None:
    prune(repository, dry_run=True)
    prune(repository)


def _write(repository: Repository) -> None:
    with repository.writer() as writer:
        writer.set_marks(ID, hold=True)
