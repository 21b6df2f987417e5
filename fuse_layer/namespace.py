"""Operations on names: lookup, create, link, unlink, rename.

Guarantees: what is created belongs to the caller (caller.py); names on the backing file system change by
exactly one system call each, so a crash leaves either state; the reserved name can neither be seen nor made.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ciuic.fuse_layer import syscalls
from ciuic.fuse_layer.caller import Caller, acting_as
from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.state import Attr, OpenFile, OverlayState, is_reserved
from ciuic.fuse_layer.tracking import ABSENT
from ciuic.fuse_layer.ways import Descriptor, Way

_BACKING_FLAGS_DROPPED = (
    os.O_APPEND | os.O_DIRECT | os.O_SYNC | os.O_DSYNC | os.O_TRUNC | os.O_EXCL | os.O_CREAT
)
_DEFAULT_ACL = "system.posix_acl_default"
_OPENED_BY_THE_KERNEL = (stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK)
_FREED_AT_ONCE_BYTES = 1 << 20
"""A job that removes an old checkpoint and writes the next one on a nearly full disk needs the space when unlink returns. Small files
keep a descriptor until the kernel forgets them, so that an O_PATH descriptor of the job's can still be opened anew."""


def backing_flags(flags: int) -> int:
    """Flags for the backing descriptor of an open with ``flags`` (see OpenFile for why)."""
    if flags & os.O_ACCMODE == os.O_WRONLY:
        flags = flags & ~os.O_ACCMODE | os.O_RDWR
    return (flags & ~_BACKING_FLAGS_DROPPED) | os.O_CLOEXEC | os.O_NOFOLLOW


def writes(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_RDONLY


class Namespace:
    """The operation group; one for each core."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self._nodes = state.nodes
        self.before_freeing: Callable[[], None] = lambda: None
        """Called before a removal that frees much space, which takes the file system up to seconds."""

    def _way(self, parent: Node, name: bytes) -> Way:
        if not parent.is_dir:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if is_reserved(self._nodes, parent, name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return Way(self._nodes.directory(parent), name)

    def _new_way(self, parent: Node, name: bytes) -> Way:
        if is_reserved(self._nodes, parent, name):
            raise PermissionError(errno.EACCES, "this name is reserved")
        return self._way(parent, name)

    def lookup(self, parent_id: int, name: bytes) -> Attr:
        """The node under a name; counts one lookup. FileNotFoundError when the name is free."""
        parent = self._nodes.get(parent_id)
        if name == b".":
            return self._counted(parent)
        if name == b"..":
            return self._counted(parent.parent or self._nodes.root)
        return self._state.adopt(parent, name, self._way(parent, name).stat, count=1)[1]

    def _counted(self, node: Node) -> Attr:
        attr = self._state.attr(node)
        self._nodes.remember(node.id)
        return attr

    def forget(self, node_id: int, count: int) -> None:
        """The kernel dropped ``count`` lookups."""
        self._nodes.forget(node_id, count)

    def readlink(self, node_id: int) -> bytes:
        pinned = self._nodes.pin(self._nodes.get(node_id))
        return os.readlink(b"", dir_fd=pinned.fd)

    # -- creating -----------------------------------------------------------------------------------

    def mkdir(self, parent_id: int, name: bytes, mode: int, caller: Caller) -> Attr:
        return self._make(
            parent_id, name, mode, caller, lambda way, m: os.mkdir(way.name or b"", m, dir_fd=way.dir_fd)
        )

    def mknod(self, parent_id: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attr:
        return self._make(
            parent_id,
            name,
            mode,
            caller,
            lambda way, m: os.mknod(way.name or b"", m, rdev, dir_fd=way.dir_fd),
        )

    def symlink(self, parent_id: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        return self._make(
            parent_id, name, 0, caller, lambda way, _: os.symlink(target, way.name or b"", dir_fd=way.dir_fd)
        )

    def _make(
        self, parent_id: int, name: bytes, mode: int, caller: Caller, make: Callable[[Way, int], None]
    ) -> Attr:
        parent = self._nodes.get(parent_id)
        with self._state.gate:
            way = self._new_way(parent, name)
            if _lstat_or_none(way) is None:  # otherwise nothing will change: EEXIST
                self._state.keep_name(parent, way, None)
            masked = self._masked(parent, way, mode, caller)

            def change() -> None:
                with acting_as(caller):
                    make(way, masked)

            self._state.with_space(change)
            return self._made(parent, name, way.stat)[1]

    def _made(self, parent: Node, name: bytes, read: Callable[[], os.stat_result]) -> tuple[Node, Attr]:
        node, attr = self._state.adopt(parent, name, read, count=1)
        if self._state.tracked(parent):
            self._state.tracker.mark_created(parent, name, node.ino)
        return node, attr

    def _masked(self, parent: Node, way: Way, mode: int, caller: Caller) -> int:
        """Apply the caller's umask, unless the directory has a default ACL, which then decides (POSIX.1e
        draft 17, 23.1.2)."""
        if not caller.umask:
            return mode
        if parent.id in self._nodes.without_default_acl:
            return mode & ~caller.umask
        try:
            os.getxattr(b"/proc/self/fd/%d/." % way.dir_fd, _DEFAULT_ACL)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
            self._nodes.without_default_acl.add(parent.id)
            return mode & ~caller.umask
        return mode

    def create(self, parent_id: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[Attr, int]:
        """Create and open; the attributes (one lookup counted) and the handle."""
        parent = self._nodes.get(parent_id)
        self._state.allowances.descriptors.check(caller.uid)  # a refused open(2) creates nothing
        with self._state.gate:
            way = self._new_way(parent, name)
            # The kernel asks for names that it knows to be free; whether it is right matters before the creation only where
            # that has to be saved.
            is_new = not self._state.undo.active or _lstat_or_none(way) is None
            if is_new:
                self._state.keep_name(parent, way, None)
            masked = self._masked(parent, way, mode, caller)
            # The caller may ask for a file that he may write and its mode forbids to read: this descriptor
            # serves reads too.
            want = backing_flags(flags) | os.O_CREAT
            try:
                fd = self._created(way, want | (os.O_EXCL if is_new else flags & os.O_EXCL), masked, caller)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
                is_new, fd = False, self._created(way, want, masked, caller)
            file = OpenFile(parent, fd, flags, caller.uid)
            read = partial(os.fstat, fd)
            if is_new:
                file.node, attr = self._made(parent, name, read)
            else:
                file.node, attr = self._state.adopt(parent, name, read, count=1)
            return attr, self._state.add_file(file)

    def _created(self, way: Way, flags: int, mode: int, caller: Caller) -> int:
        create = partial(os.open, way.name or b"", flags, mode, dir_fd=way.dir_fd)
        if caller.uid == 0 and caller.gid == 0:
            return self._state.with_space(create)

        def change() -> int:  # its space is made by root, not by the caller
            with acting_as(caller):
                return create()

        return self._state.with_space(change)

    def tmpfile(self, parent_id: int, mode: int, flags: int, caller: Caller) -> tuple[Attr, int]:
        """Create and open a file without a name (O_TMPFILE); the attributes (one lookup counted) and the handle."""
        parent = self._nodes.get(parent_id)
        way = Way(self._nodes.directory(parent), b".")
        self._state.allowances.descriptors.check(caller.uid)
        with self._state.gate:
            masked = self._masked(parent, way, mode, caller)
            want = backing_flags(flags) | os.O_TMPFILE | (flags & os.O_EXCL)

            def change() -> int:
                with acting_as(caller):
                    return os.open(b".", want & ~os.O_NOFOLLOW, masked, dir_fd=way.dir_fd)

            file = OpenFile(parent, self._state.with_space(change), flags, caller.uid)
            st = os.fstat(file.fd)
            file.node = self._nodes.adopt_nameless(st)
            self._state.undo.hidden.keep_orphan(st.st_ino, b"/proc/self/fd/%d" % file.fd, None, follow=True)
            attr = Attr(file.node.id, 0, st, st.st_nlink, written=writes(flags))
            return attr, self._state.add_file(file)

    def link(self, node_id: int, new_parent_id: int, new_name: bytes) -> Attr:
        node, parent = self._nodes.get(node_id), self._nodes.get(new_parent_id)
        state = self._state
        with state.gate:
            way = self._new_way(parent, new_name)
            source, nameless = self._source_of_link(node)
            state.keep_inode(node)
            if _lstat_or_none(way) is None:
                state.keep_name(parent, way, None)
            path = b"/proc/self/fd/%d" % source.fd
            state.with_space(lambda: os.link(path, new_name, dst_dir_fd=way.dir_fd, follow_symlinks=True))
            if state.tracked(parent) and nameless:
                state.tracker.mark_created(parent, new_name, node.ino)  # O_TMPFILE: in no snapshot before
            elif state.tracked(parent):
                state.tracker.mark_name(parent, new_name, ABSENT)
            if state.tracked(parent):
                for known_parent, known_name in node.names():
                    state.tracker.mark_touched(
                        known_parent, known_name
                    )  # one name becomes several: each entry changes its form
                state.tracker.mark_attrs(node)
            attr = state.adopt(parent, new_name, way.stat, count=1)[1]
            if nameless:
                # The name is in the ledger now: before, a successor finds the file by our link alone.
                state.undo.hidden.let_orphan_go(node.ino)
            return attr

    def _source_of_link(self, node: Node) -> tuple[Descriptor, bool]:
        """A descriptor of what gets one more name, never a name alone: another thread may rename something else to it.

        The second value tells that it has no name, because O_TMPFILE made it. The system refuses a link (ENOENT) to a file
        that has lost its last name.
        """
        file = self._state.any_file(node)
        if node.parent is None and file is not None:
            return Descriptor(os.dup(file.fd)), True
        if self._nodes.way(node).name is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._nodes.pin(node), False

    # -- removing -----------------------------------------------------------------------------------

    def unlink(self, parent_id: int, name: bytes) -> None:
        self._remove(parent_id, name, lambda way: os.unlink(way.name or b"", dir_fd=way.dir_fd))

    def rmdir(self, parent_id: int, name: bytes) -> None:
        self._remove(parent_id, name, lambda way: os.rmdir(way.name or b"", dir_fd=way.dir_fd))

    def _remove(self, parent_id: int, name: bytes, remove: Callable[[Way], None]) -> None:
        parent = self._nodes.get(parent_id)
        with self._state.gate:
            way = self._way(parent, name)
            target = self._target(way)
            self._state.keep_name(parent, way, target.st)
            keep = self._keep_removed(target, way)
            if target.is_remembered:
                self._nodes.changing(parent, name, target.st.st_ino, goes=target.remembered)
            try:
                self._state.with_space(lambda: remove(way))
            except OSError:
                if target.is_remembered:
                    self._nodes.unchanged(parent, name)
                raise
            if self._state.tracked(parent):
                self._state.tracker.mark_removed(parent, name, target.st.st_ino)
            self._unbound(parent, name, target, keep)

    def _target(self, way: Way) -> _Target:
        st, nlink = self._state.undo.links(way.stat)  # before keep_name may add a link of ours
        return _Target(st, nlink, self._nodes.find(st))

    def _keep_removed(self, target: _Target, way: Way) -> Descriptor | None:
        """A descriptor for what is about to lose its name while the kernel may still ask about it."""
        node = target.node
        # Other links than this one do not help a successor unless we know one: the kernel may have forgotten them.
        if target.may_be_open and (target.nlink <= 1 or (node is not None and not node.aliases)):
            assert node is not None
            node.kept = node.handles is None
            self._state.undo.hidden.keep_orphan(node.ino, way.name or b"", way.dir_fd, follow=False)
        if target.frees_much:
            self.before_freeing()
            return None  # a descriptor would keep the space until the kernel forgets the node, after it was answered
        if node is None or not node.lookups:
            return None
        return Descriptor(
            os.open(way.name or b"", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=way.dir_fd)
        )

    def _unbound(self, parent: Node, name: bytes, target: _Target, keep: Descriptor | None) -> None:
        """Tables and marks of an inode that lost this name; the name itself is the caller's to mark."""
        gone = stat.S_ISDIR(target.st.st_mode) or target.nlink <= 1
        node = target.node
        if node is not None:
            self._nodes.unlinked(node, parent, name, gone=gone, keep=keep, last=target.st)
        if target.st.st_dev != self._nodes.device:
            return
        tracker = self._state.tracker
        if gone and tracker.is_fresh(target.st.st_ino):
            tracker.forget_created(target.st.st_ino)
            return
        if node is not None:
            for (
                known_parent,
                known_name,
            ) in node.names():  # of several names one may remain: its entry changes its form
                tracker.mark_touched(known_parent, known_name)
        self._mark_touched(node, target.st)

    # -- renaming -----------------------------------------------------------------------------------

    def rename(self, parent_id: int, name: bytes, new_parent_id: int, new_name: bytes, flags: int) -> None:
        """rename(2) or, with flags, renameat2(2)."""
        parent, new_parent = self._nodes.get(parent_id), self._nodes.get(new_parent_id)
        state = self._state
        with state.gate:
            way, new_way = self._way(parent, name), self._new_way(new_parent, new_name)
            source, replaced = self._target(way), self._target_or_none(new_way)
            if replaced is not None and source.key == replaced.key and not flags:
                return  # two names of one file: rename(2) does nothing
            exchange = bool(flags & syscalls.RENAME_EXCHANGE)
            state.keep_name(parent, way, source.st, moved=True)
            state.keep_name(new_parent, new_way, replaced.st if replaced else None, moved=exchange)
            keep = self._keep_removed(replaced, new_way) if replaced is not None and not exchange else None
            self._nodes.changing(
                parent, name, source.st.st_ino, to=(new_parent, new_name),
                replaced=replaced.st.st_ino if replaced is not None else 0, exchange=exchange,
                goes=replaced.remembered if replaced is not None and not exchange else None,
            )  # fmt: skip
            try:
                state.with_space(lambda: _rename(way, new_way, flags))
            except OSError:
                self._nodes.unchanged(parent, name, to=(new_parent, new_name))
                raise
            if exchange and replaced is not None:
                self._exchanged((parent, name, source), (new_parent, new_name, replaced))
                return
            if replaced is not None:
                self._unbound(new_parent, new_name, replaced, keep)
            self._moved(parent, name, source, new_parent, new_name, replaced)
            if flags & syscalls.RENAME_WHITEOUT:
                self._nodes.forget(self._made(parent, name, way.stat)[0].id, 1)

    def _target_or_none(self, way: Way) -> _Target | None:
        try:
            return self._target(way)
        except FileNotFoundError:
            return None

    def _moved(
        self,
        parent: Node,
        name: bytes,
        source: _Target,
        new_parent: Node,
        new_name: bytes,
        replaced: _Target | None,
    ) -> None:
        if source.node is not None:
            self._nodes.renamed(source.node, parent, name, new_parent, new_name)
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_removed(parent, name, source.st.st_ino)
        tracker.mark_name(new_parent, new_name, replaced.st.st_ino if replaced is not None else ABSENT)
        self._mark_touched(source.node, source.st)

    def _exchanged(self, one: tuple[Node, bytes, _Target], other: tuple[Node, bytes, _Target]) -> None:
        (parent, name, here), (new_parent, new_name, there) = one, other
        # The first one last: its record is the one that settles the change, so a successor that has it has both.
        if there.node is not None:
            self._nodes.renamed(there.node, new_parent, new_name, parent, name)
        if here.node is not None:
            self._nodes.renamed(here.node, parent, name, new_parent, new_name)
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_name(parent, name, here.st.st_ino)
        tracker.mark_name(new_parent, new_name, there.st.st_ino)
        self._mark_touched(here.node, here.st)
        self._mark_touched(there.node, there.st)

    def _mark_touched(self, node: Node | None, st: os.stat_result) -> None:
        """The inode's link count or ctime moved."""
        if node is not None and node.parent is not None:
            self._state.tracker.mark_attrs(node)
        else:
            self._state.tracker.mark_ino(st.st_ino)


class _Target(NamedTuple):
    """What a name is bound to, with the link count that users see."""

    st: os.stat_result
    nlink: int
    node: Node | None

    @property
    def key(self) -> tuple[int, int]:
        return self.st.st_dev, self.st.st_ino

    @property
    def remembered(self) -> tuple[Node, os.stat_result] | None:
        """The node with its attributes, where the kernel knows it."""
        return None if self.node is None else (self.node, self.st)

    @property
    def may_be_open(self) -> bool:
        """Whether a program may have the file open. The kernel opens pipes and devices by itself and tells nobody."""
        if self.node is None:
            return False
        return self.node.handles is not None or (
            bool(self.node.lookups) and stat.S_IFMT(self.st.st_mode) in _OPENED_BY_THE_KERNEL
        )

    @property
    def frees_much(self) -> bool:
        """Whether this is the last name of a large file that nobody has open."""
        node = self.node
        return (
            stat.S_ISREG(self.st.st_mode)
            and self.nlink <= 1
            and self.st.st_blocks * 512 >= _FREED_AT_ONCE_BYTES
            and (node is None or node.handles is None)
        )

    @property
    def is_remembered(self) -> bool:
        """Return whether the kernel may still ask for the inode: it has it until it is told of the removal. A successor that took a
        new file with the same number for it would give two files one node."""
        return self.node is not None


def _lstat_or_none(way: Way) -> os.stat_result | None:
    try:
        return way.stat()
    except FileNotFoundError:
        return None


def _rename(way: Way, new_way: Way, flags: int) -> None:
    old, new = way.name or b"", new_way.name or b""
    if flags:
        syscalls.renameat2(way.dir_fd, old, new_way.dir_fd, new, flags)
    else:
        os.rename(old, new, src_dir_fd=way.dir_fd, dst_dir_fd=new_way.dir_fd)
