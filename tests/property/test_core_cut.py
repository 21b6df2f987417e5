"""Tests of the cut on the core alone: backing directory and undo log together always give the old state.

A Hypothesis machine runs random operations through the core, cuts at random points, goes on changing things,
and then rebuilds each pending epoch with a small reader of its own (not capture's). It also checks what the
sealed file says against what really differs between one cut and the next, block by block and name by name.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from support.overlay import state_of

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer import sealed_format, undo_format
from ciuic.fuse_layer.core import overlay_hooks
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore, SetAttr
from ciuic.fuse_layer.system import syscalls
from ciuic.system.spill import Spill

BLOCK = 4096
NAMES = [b"a", b"b", b"c", b"\xff\n|"]
ROOT = Credentials(0, 0)


def undo_of(top: bytes) -> bytes:
    """Return the undo directory of the root at ``top``."""
    return os.fsencode(state_of(Path(os.fsdecode(top))) / "undo")


@dataclass(frozen=True)
class Seen:
    """Inode as observed under one path."""

    ino: int
    attributes: tuple[int, ...]
    xattrs: tuple[tuple[bytes, bytes], ...]
    content: bytes = b""
    """File content, or the target of a symbolic link."""


@dataclass
class World:
    """A tree at one instant: path to what is there; () is the root."""

    paths: dict[tuple[bytes, ...], Seen] = field(default_factory=dict)


def attributes(s: os.stat_result | undo_format.OldStat, nlink: int) -> tuple[int, ...]:
    size = getattr(s, "st_size", None) if isinstance(s, os.stat_result) else s.size
    if isinstance(s, os.stat_result):
        mode, uid, gid, mtime = s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns
    else:
        mode, uid, gid, mtime = s.mode, s.uid, s.gid, s.mtime_ns
    is_dir = stat.S_ISDIR(mode)
    return (mode, uid, gid, mtime, 0 if is_dir else nlink, 0 if is_dir else size or 0)


def xattrs_of(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    names = os.listxattr(path, follow_symlinks=False)
    return tuple(sorted((os.fsencode(n), os.getxattr(path, n, follow_symlinks=False)) for n in names))


def has_hold_link(top: bytes, ino: int) -> bool:
    return os.path.lexists(os.path.join(undo_of(top), b"hold", b"%d" % ino))


def observe(top: bytes) -> World:
    """Read the backing directory as it is while nothing changes."""
    world = World()

    def visit(path: bytes, key: tuple[bytes, ...]) -> None:
        s = os.lstat(path)
        content = b""
        if stat.S_ISREG(s.st_mode):
            with open(path, "rb") as file:
                content = file.read()
        elif stat.S_ISLNK(s.st_mode):
            content = os.readlink(path)
        held = has_hold_link(top, s.st_ino)
        world.paths[key] = Seen(s.st_ino, attributes(s, s.st_nlink - held), xattrs_of(path), content)
        if stat.S_ISDIR(s.st_mode):
            for name in os.listdir(path):
                if key or name != STATE_DIR_NAME:
                    visit(os.path.join(path, name), (*key, name))

    visit(top, ())
    return world


def rebuild(top: bytes, root_ino: int, log: undo_format.LogReader) -> World:
    """Rebuild the tree at the cut: the backing directory corrected by the undo log."""
    world = World()
    undo = undo_of(top)

    def visit(path: bytes | None, ino: int, key: tuple[bytes, ...]) -> None:
        record = log.inode(ino)
        if record is not None:
            mode, seen = record.stat.mode, attributes(record.stat, record.stat.nlink)
            xattrs = tuple(sorted(record.xattrs.items()))
        else:
            assert path is not None, "an inode that moved away has an inode record"
            s = os.stat(path) if path.startswith(b"/proc/") and path.endswith(b"/.") else os.lstat(path)
            assert s.st_ino == ino
            mode, xattrs = s.st_mode, xattrs_of(path)
            seen = attributes(s, s.st_nlink - has_hold_link(top, ino))
        content = b""
        if stat.S_ISREG(mode):
            assert path is not None
            content = patched(path, ino, seen[-1])
        elif stat.S_ISLNK(mode):
            assert path is not None
            content = os.readlink(path)
        world.paths[key] = Seen(ino, seen, xattrs, content)
        if stat.S_ISDIR(mode):
            for name, child, child_ino in children(path, ino, top_level=not key):
                visit(child, child_ino, (*key, name))

    def patched(path: bytes, ino: int, size: int) -> bytes:
        with open(path, "rb") as file:
            content = bytearray(file.read(size).ljust(size, b"\0"))
        for run in log.blocks(ino, 0, -(-size // BLOCK)):
            with open(os.path.join(undo, undo_format.blocks_name(ino, run.epoch).encode()), "rb") as file:
                for block in range(run.first, run.stop):
                    old = os.pread(file.fileno(), BLOCK, block * BLOCK)
                    start, stop = block * BLOCK, min(size, (block + 1) * BLOCK)
                    content[start:stop] = old[: stop - start].ljust(stop - start, b"\0")
        return bytes(content)

    def children(path: bytes | None, ino: int, *, top_level: bool) -> list[tuple[bytes, bytes | None, int]]:
        found: dict[bytes, tuple[bytes | None, int]] = {}
        if path is not None:
            for name in os.listdir(path):
                if not top_level or name != STATE_DIR_NAME:
                    child = os.path.join(path, name)
                    found[name] = child, os.lstat(child).st_ino
        for name, record in log.names(ino).items():
            found.pop(name, None)
            if record.ino and stat.S_ISDIR(record.file_type << 12):
                kept = b"/proc/self/fd/%d/." % record.fd if record.fd >= 0 else None
                found[name] = kept, record.ino
            elif record.ino:
                found[name] = os.path.join(undo, undo_format.hold_name(record.ino).encode()), record.ino
        return [(name, *where) for name, where in found.items()]

    visit(top, root_ino, ())
    return world


def check_tracking(sealed: sealed_format.Sealed, before: World, now: World) -> None:
    """Check that all that differs between two cuts is in the sealed file, and touched names lead to it."""
    changes = dict(sealed.changes.items())
    old_by_ino = {seen.ino: seen for seen in before.paths.values()}
    ino_at = {key: seen.ino for key, seen in now.paths.items()}
    old_ino_at = {key: seen.ino for key, seen in before.paths.items()}
    old_bindings = {(old_ino_at[key[:-1]], key[-1]): ino for key, ino in old_ino_at.items() if key}
    bindings = {(ino_at[key[:-1]], key[-1]): ino for key, ino in ino_at.items() if key}

    def fresh(ino: int) -> bool:
        return ino in changes and changes[ino].fresh

    def reachable(key: tuple[bytes, ...]) -> bool:
        for depth in range(len(key)):
            change = changes.get(ino_at[key[:depth]])
            if change is None:
                return False
            if change.fresh:
                return True
            if key[depth] not in (change.names or {}):
                return False
        return True

    for key, seen in now.paths.items():
        old = old_by_ino.get(seen.ino)
        if fresh(seen.ino):
            assert reachable(key), f"{key}: created, and no touched name leads there"
            continue
        assert old is not None, f"{key}: inode {seen.ino} is new and not marked so"
        if seen == old:
            continue
        change = changes.get(seen.ino)
        assert change is not None, f"{key}: changed and not tracked: {old} → {seen}"
        assert reachable(key) or seen.attributes[4] > 1, f"{key}: no touched name leads there"
        for block in range(max(len(seen.content), len(old.content)) // BLOCK + 1):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            if stat.S_ISREG(seen.attributes[0]) and seen.content[part] != old.content[part]:
                marked = change.data == 1 or (
                    isinstance(change.data, bytes)
                    and any(first <= block < stop for first, stop in undo_format.bitmap_runs(change.data))
                )
                assert marked, f"{key}: block {block} changed and is not marked"
    for (dir_ino, name), ino in bindings.items():
        if fresh(dir_ino) or (old_bindings.get((dir_ino, name)) == ino and not fresh(ino)):
            continue
        assert (changes[dir_ino].names or {}).get(name, -1) == old_bindings.get((dir_ino, name), 0)
    for (dir_ino, name), ino in old_bindings.items():
        if (dir_ino, name) not in bindings and dir_ino in ino_at.values() and not fresh(dir_ino):
            assert (changes[dir_ino].names or {}).get(name) == ino, "a removed name is not touched"


class CoreMachine(RuleBasedStateMachine):
    """Operations through the core; every rule may fail with an errno that a plain file system would give."""

    directories = Bundle("directories")
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.mkdtemp(prefix="ciuic-core-")
        self.top = self.place.encode() + b"/root"
        os.makedirs(self.top + b"/a/b")
        with open(self.top + b"/c", "wb") as file:
            file.write(b"0123456789" * 3000)
        self.umask = os.umask(0)
        self.backing_fd = os.open(self.top, os.O_PATH | os.O_DIRECTORY)
        self.core = OverlayCore(self.backing_fd, session="0" * 32, block_size=BLOCK)
        self.root_ino = os.stat(self.top).st_ino
        self.worlds: dict[int, World] = {}
        self.history: dict[int, World] = {}
        self.limit, overlay_hooks.COPY_LIMIT_BYTES = overlay_hooks.COPY_LIMIT_BYTES, 2 * BLOCK

    def teardown(self) -> None:
        overlay_hooks.COPY_LIMIT_BYTES = self.limit
        self.core.close()
        os.close(self.backing_fd)
        os.umask(self.umask)
        shutil.rmtree(self.place)

    @initialize(target=directories)
    def root_directory(self) -> int:
        return ROOT_ID

    def node(self, directory: int, name: bytes) -> int:
        attr = self.core.names.lookup(directory, name)
        return attr.node

    @rule(target=directories, parent=directories, name=st.sampled_from(NAMES))
    def mkdir(self, parent: int, name: bytes) -> object:
        with suppress(OSError):
            return self.core.names.mkdir(parent, name, 0o755, ROOT).node
        return multiple()

    @rule(target=directories, parent=directories, name=st.sampled_from(NAMES))
    def look(self, parent: int, name: bytes) -> object:
        with suppress(OSError):
            attr = self.core.names.lookup(parent, name)
            if stat.S_ISDIR(attr.st.st_mode):
                return attr.node
        return multiple()

    @rule(target=handles, parent=directories, name=st.sampled_from(NAMES), size=st.integers(0, 6 * BLOCK))
    def create(self, parent: int, name: bytes, size: int) -> object:
        with suppress(OSError):
            _, handle = self.core.names.create(parent, name, 0o644, os.O_RDWR | os.O_EXCL, ROOT)
            self.core.files.write(handle, 0, os.urandom(size))
            return handle
        return multiple()

    @rule(target=handles, parent=directories, name=st.sampled_from(NAMES), truncate=st.booleans())
    def open(self, parent: int, name: bytes, truncate: bool) -> object:
        with suppress(OSError):
            attr = self.core.names.lookup(parent, name)
            if stat.S_ISREG(attr.st.st_mode):
                return self.core.files.open(attr.node, os.O_RDWR | (os.O_TRUNC if truncate else 0))
        return multiple()

    @rule(handle=handles, offset=st.integers(0, 8 * BLOCK), size=st.integers(1, 3 * BLOCK))
    def write(self, handle: int, offset: int, size: int) -> None:
        data = os.urandom(size)
        assert self.core.files.write(handle, offset, data) == size
        assert self.core.files.read(handle, offset, size) == data

    @rule(handle=consumes(handles))
    def release(self, handle: int) -> None:
        self.core.files.release(handle)

    @rule(parent=directories, name=st.sampled_from(NAMES), size=st.integers(0, 10 * BLOCK))
    def truncate(self, parent: int, name: bytes, size: int) -> None:
        with suppress(OSError):
            attr = self.core.names.lookup(parent, name)
            if stat.S_ISREG(attr.st.st_mode):
                after = self.core.attributes.setattr(attr.node, SetAttr(size=size))
                assert after.st.st_size == size
                assert after.node == attr.node

    @rule(
        handle=handles,
        mode=st.sampled_from([0, 1, 3, 16, 17]),
        offset=st.integers(0, 6 * BLOCK),
        size=st.integers(1, 3 * BLOCK),
    )
    def fallocate(self, handle: int, mode: int, offset: int, size: int) -> None:
        with suppress(OSError):
            self.core.files.fallocate(handle, mode, offset, size)

    @rule(parent=directories, name=st.sampled_from(NAMES))
    def remove(self, parent: int, name: bytes) -> None:
        with suppress(OSError):
            attr = self.core.names.lookup(parent, name)
            (self.core.names.rmdir if stat.S_ISDIR(attr.st.st_mode) else self.core.names.unlink)(parent, name)

    @rule(old=directories, name=st.sampled_from(NAMES), new=directories, new_name=st.sampled_from(NAMES),
          flags=st.sampled_from([0, 0, 0, syscalls.RENAME_NOREPLACE, syscalls.RENAME_EXCHANGE]))  # fmt: skip
    def rename(self, old: int, name: bytes, new: int, new_name: bytes, flags: int) -> None:
        with suppress(OSError):
            self.core.names.rename(old, name, new, new_name, flags)

    @rule(parent=directories, name=st.sampled_from(NAMES), new=directories, new_name=st.sampled_from(NAMES))
    def link(self, parent: int, name: bytes, new: int, new_name: bytes) -> None:
        with suppress(OSError):
            attr = self.core.names.link(self.node(parent, name), new, new_name)
            assert attr.nlink > 1

    @rule(parent=directories, name=st.sampled_from(NAMES), to=st.sampled_from(NAMES))
    def symlink(self, parent: int, name: bytes, to: bytes) -> None:
        with suppress(OSError):
            self.core.names.symlink(parent, name, to, ROOT)

    @rule(
        parent=directories,
        name=st.sampled_from(NAMES),
        what=st.sampled_from(["mode", "owner", "times", "xattr"]),
        value=st.integers(0, 511),
    )
    def attribute(self, parent: int, name: bytes, what: str, value: int) -> None:
        with suppress(OSError):
            attr = self.core.names.lookup(parent, name)
            if what == "mode" and not stat.S_ISLNK(attr.st.st_mode):
                self.core.attributes.setattr(attr.node, SetAttr(mode=value))
            elif what == "owner":
                self.core.attributes.setattr(attr.node, SetAttr(uid=value, gid=value))
            elif what == "times":
                self.core.attributes.setattr(attr.node, SetAttr(mtime_ns=value * 10**9 + 1))
            elif what == "xattr":
                self.core.attributes.setxattr(attr.node, b"trusted.t%d" % (value % 3), b"v%d" % value, 0)

    @rule()
    def cut(self) -> None:
        if len(self.worlds) >= 3:
            return
        cut = self.core.cut()
        now = observe(self.top)
        self.worlds[cut.epoch] = self.history[cut.epoch] = now
        self.check_sealed(cut.epoch)

    def check_sealed(self, epoch: int) -> None:
        path = f"{os.fsdecode(undo_of(self.top))}/{undo_format.sealed_name(epoch)}"
        sealed = sealed_format.read_sealed(path, Spill(os.fsdecode(self.top)))
        if sealed.head.complete:
            check_tracking(sealed, self.history[sealed.head.since], self.history[epoch])

    @rule(commit=st.booleans())
    def end_oldest(self, commit: bool) -> None:
        if not self.worlds:
            return
        epoch = min(self.worlds)
        self.verify(epoch)
        self.check_sealed(epoch)
        del self.worlds[epoch]
        (self.core.committed if commit else self.core.abort)(epoch)

    def verify(self, epoch: int) -> None:
        path = f"{os.fsdecode(undo_of(self.top))}/{undo_format.LOG_NAME}"
        log = undo_format.LogReader(path, epoch)
        try:
            log.poll()
            assert rebuild(self.top, self.root_ino, log).paths == self.worlds[epoch].paths
        finally:
            log.close()

    @invariant()
    def nothing_was_given_up(self) -> None:
        assert self.core.status()["abandoned"] == []

    @invariant()
    def every_pending_epoch_is_still_there(self) -> None:
        for epoch in self.worlds:
            self.verify(epoch)


CoreMachine.TestCase.settings = settings(deadline=None, stateful_step_count=40)
TestCoreCut = CoreMachine.TestCase
