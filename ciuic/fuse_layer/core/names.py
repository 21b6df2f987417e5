"""Operations that find, make, take or move names: lookup, create, link, unlink, rmdir, rename.

Guarantees: a new file belongs to the caller (caller.py); names on the backing file system change by exactly
one system call each, so a crash leaves either state; the reserved name can neither be seen nor made. What a file
system that tracks changes does beside them hangs on the hooks of `Names` (overlay_hooks.py) and of the state; here
they do nothing.

The session's journal announces a removal or rename before the system call and records the outcome after it
(journal/records.py). A successor compares changes that a killed worker had begun with the directory, and corrects
its node table (`settle`). Guarantee: afterwards the table binds no name of an interrupted rename or removal to an
inode that the directory has elsewhere. It holds before the first request is answered: a repeated request that
finds its work done then has nothing left to do. The kernel keeps the directories of such a request locked until it
is answered, so nothing else can have changed these names since.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import structlog

from ciuic.fuse_layer.core.files import backing_flags, writes
from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.journal.records import ChangedInodes, ChangedNames, Changes
from ciuic.fuse_layer.state.node_table import Node, NodeTable
from ciuic.fuse_layer.state.passthrough_state import Attr, OpenFile, PassthroughState, is_reserved
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.caller import Credentials, acting_as
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle
from ciuic.system.disk import PIN

log = structlog.get_logger(__name__)

_MAX_ROUNDS = 8
"""Limit of rounds. A directory may be reached only when a rename of one above it is settled; interrupted
renames nest no deeper than there are threads of a job that rename ancestors of each other's directories at
one instant."""


def _note_changing(
    journal: JournalWriter | None,
    parent: Node,
    name: bytes,
    ino: int,
    *,
    to: tuple[Node, bytes] | None = None,
    replaced: int = 0,
    exchange: bool = False,
    goes: tuple[Node, os.stat_result] | None = None,
) -> None:
    """Note that a name is about to be renamed or removed, before the system call that does it.

    Args:
        journal: journal of the session; None where there can be no successor.
        parent: directory of the name.
        name: name that changes.
        ino: inode number that the name leads to.
        to: directory and name after a rename; None for a removal.
        replaced: inode number under the new name, 0 where that is free.
        exchange: both names stay, and exchange their inodes.
        goes: node and attributes of the inode that loses its name, where the kernel remembers it.
    """
    if journal is None:
        return
    if goes is not None and stat.S_ISDIR(goes[1].st_mode):
        # Mode and owner end with the directory, and a program that has it open may still ask for them.
        st = goes[1]
        journal.append(records.emptied_record(goes[0].id, st.st_mode, st.st_uid, st.st_gid))
    inodes = ChangedInodes(ino, replaced, exchange)
    journal.append(records.changing_record(_names(parent, name, to), inodes))


def _note_unchanged(
    journal: JournalWriter | None, parent: Node, name: bytes, *, to: tuple[Node, bytes] | None = None
) -> None:
    """Note that the file system refused the change that ``_note_changing`` announced."""
    # Without this record a successor, after the name was renamed later, would take it for removed: the file
    # would get a second node, whose attributes the kernel keeps apart from those of the first.
    _note_settled(journal, _names(parent, name, to))


def _note_settled(journal: JournalWriter | None, names: ChangedNames) -> None:
    """Note that the outcome of a change of these names is known."""
    if journal is not None:
        journal.append(records.unchanged_record(names))


def _names(parent: Node, name: bytes, to: tuple[Node, bytes] | None) -> ChangedNames:
    if to is None:
        return ChangedNames(parent.id, name)
    return ChangedNames(parent.id, name, to[0].id, to[1])


def settle(nodes: NodeTable, changes: Changes, is_gone: Callable[[Node], bool]) -> None:
    """Apply every change that took effect; ``is_gone`` tells whether no name leads to a node any more.

    The newest first: an older one of the same name was refused, and its worker died before it could say so. A
    rename that took effect moves the node away from that name, so that the older record finds nothing to do.
    """
    waiting = list(changes.items())[::-1]
    for _ in range(_MAX_ROUNDS):
        missed = [(names, inodes) for names, inodes in waiting if not _settled(nodes, names, inodes, is_gone)]
        if len(missed) == len(waiting):
            break
        waiting = missed
    for names in changes:
        _note_settled(nodes.journal, names)
    if waiting:
        # A directory of theirs was removed later, or never was: no request can name them.
        log.info("name_changes_not_settled", count=len(waiting))


def _settled(
    nodes: NodeTable, names: ChangedNames, inodes: ChangedInodes, is_gone: Callable[[Node], bool]
) -> bool:
    """Settle one change; return False after an error."""
    # A successor that could not start would cost the job more than one stale name.
    try:
        return _settle_one(nodes, names, inodes, is_gone)
    except OSError:
        return False


def _settle_one(
    nodes: NodeTable, names: ChangedNames, inodes: ChangedInodes, is_gone: Callable[[Node], bool]
) -> bool:
    """Settle one change; return False where a directory cannot be reached (yet)."""
    try:
        parent = nodes.get(names.parent)
        here = _ino(nodes, parent, names.name)
        if not names.new_parent:
            if here != inodes.ino:
                _removed(nodes, inodes.ino, parent, names.name, is_gone)
            return True
        new_parent = nodes.get(names.new_parent)
        there = _ino(nodes, new_parent, names.new_name)
    except OSError:
        return False
    # The inode that was under the new name goes first: the record of the rename itself marks the change as
    # settled, and this worker may die before it is written.
    if inodes.replaced and there != inodes.replaced:
        replaced = nodes.by_ino(inodes.replaced)
        if inodes.exchange and here == inodes.replaced and replaced is not None:
            if (new_parent, names.new_name) in replaced.names():
                nodes.renamed(replaced, new_parent, names.new_name, parent, names.name)
        else:
            _removed(nodes, inodes.replaced, new_parent, names.new_name, is_gone)
    moved = nodes.by_ino(inodes.ino)
    if (
        there == inodes.ino
        and here != inodes.ino
        and moved is not None
        and (parent, names.name) in moved.names()
    ):
        nodes.renamed(moved, parent, names.name, new_parent, names.new_name)
    return True


def _removed(nodes: NodeTable, ino: int, parent: Node, name: bytes, is_gone: Callable[[Node], bool]) -> None:
    node = nodes.by_ino(ino)
    if node is not None and (parent, name) in node.names():
        gone = node.is_dir or (len(node.names()) == 1 and is_gone(node))
        nodes.unlinked(node, parent, name, gone=gone, keep=None)


def _ino(nodes: NodeTable, parent: Node, name: bytes) -> int:
    """Return the inode number under a name now, 0 when it is free.

    Raises:
        OSError: the directory cannot be reached.
    """
    directory = nodes.directory(parent)
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0


_DEFAULT_ACL = "system.posix_acl_default"
_OPENED_BY_THE_KERNEL = (stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK)
_FREED_AT_ONCE_BYTES = 1 << 20
"""Size from which on a removed file's space is free when unlink(2) returns.

A job that removes an old checkpoint and writes the next one on a nearly full disk needs that. Smaller files
keep a descriptor until the kernel forgets them, so that an O_PATH descriptor of the job's can still be opened
anew.
"""


def _entry_of(state: PassthroughState, parent: Node, name: bytes) -> PathHandle:
    """Return the entry of a name in the backing directory.

    Raises:
        NotADirectoryError: ``parent`` is no directory.
        FileNotFoundError: the name is reserved, so the job does not see it.
    """
    if not parent.is_dir:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if is_reserved(state.nodes, parent, name):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return PathHandle(state.nodes.directory(parent), name)


def _new_entry_of(state: PassthroughState, parent: Node, name: bytes) -> PathHandle:
    """Return the entry of a name that is to be made.

    Raises:
        PermissionError: the name is reserved.
    """
    if is_reserved(state.nodes, parent, name):
        raise PermissionError(errno.EACCES, "this name is reserved")
    return _entry_of(state, parent, name)


class Names:
    """Operations of one root on names."""

    def __init__(self, state: PassthroughState) -> None:
        self._state = state
        self._nodes = state.nodes
        self.before_freeing: Callable[[], None] = lambda: None
        """Called before a removal that frees much space, which takes the file system up to seconds; a driver lets other
        requests go on."""

    # -- hooks: called inside the gate ----------------------------------------------------------------

    def _before_making(self, parent: Node, entry: PathHandle) -> None:
        """Called before a name is made that may be taken."""

    def _is_new(self, parent: Node, entry: PathHandle) -> bool:
        """Called in place of ``_before_making`` for a name that the kernel believes to be free; return whether it is, as far as is known."""
        # Whether the kernel is right shows at the creation.
        return True

    def _made(self, parent: Node, name: bytes, node: Node) -> None:
        """Called after a new inode was made under a name."""

    def _linked(self, node: Node, parent: Node, name: bytes, *, nameless: bool) -> None:
        """Called after an inode was given a name; ``nameless``: it had none, because O_TMPFILE made it."""

    def _removed(self, parent: Node, name: bytes, target: Target) -> None:
        """Called after a name was removed, before the node loses it."""

    def _lost_name(self, target: Target, *, gone: bool) -> None:
        """Called after the node of an inode has lost a name; ``gone``: the last one."""

    def _moved(
        self,
        parent: Node,
        name: bytes,
        source: Target,
        new_parent: Node,
        new_name: bytes,
        replaced: Target | None,
    ) -> None:
        """Called after a rename, and after ``_lost_name`` of the inode that was ``replaced``."""

    def _exchanged(self, one: tuple[Node, bytes, Target], other: tuple[Node, bytes, Target]) -> None:
        """Called after two names have exchanged their inodes, here with those from before."""

    def lookup(self, parent_id: int, name: bytes) -> Attr:
        """Return the node under a name, and count one lookup of it.

        Raises:
            FileNotFoundError: the name is free.
        """
        parent = self._nodes.get(parent_id)
        # The kernel looks these two up for file handles (NFS export) alone.
        if name == b".":
            return self._counted(parent)
        if name == b"..":
            return self._counted(parent.parent or self._nodes.root)
        return self._state.adopt(parent, name, _entry_of(self._state, parent, name).stat, count=1)[1]

    def _counted(self, node: Node) -> Attr:
        attr = self._state.attr(node)
        self._nodes.remember(node.id)
        return attr

    def peek(self, parent_id: int, name: bytes) -> int:
        """Return the inode number under a name; no lookup is counted.

        Raises:
            FileNotFoundError: the name is free.
        """
        directory = self._nodes.directory(self._nodes.get(parent_id))
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_ino

    def dot(self, node_id: int, name: bytes) -> int:
        """Return the node id of "." or ".." in a directory; no lookup is counted."""
        node = self._nodes.get(node_id)
        return (node if name == b"." else node.parent or self._nodes.root).id

    def readlink(self, node_id: int) -> bytes:
        """Return the target of a symbolic link."""
        pinned = self._nodes.pin(self._nodes.get(node_id))
        # The empty path is the pinned link itself (readlinkat(2)): its name may lead elsewhere by now.
        return os.readlink(b"", dir_fd=pinned.fd)

    # -- creating -----------------------------------------------------------------------------------

    def mkdir(self, parent_id: int, name: bytes, mode: int, caller: Credentials) -> Attr:
        """Make a directory; count one lookup of it."""
        return self._make(
            parent_id,
            name,
            mode,
            caller,
            lambda entry, m: os.mkdir(entry.name or b"", m, dir_fd=entry.dir_fd),
        )

    def mknod(self, parent_id: int, name: bytes, mode: int, rdev: int, caller: Credentials) -> Attr:
        """Make a file, pipe, socket or device; count one lookup of it."""
        return self._make(
            parent_id,
            name,
            mode,
            caller,
            lambda entry, m: os.mknod(entry.name or b"", m, rdev, dir_fd=entry.dir_fd),
        )

    def symlink(self, parent_id: int, name: bytes, target: bytes, caller: Credentials) -> Attr:
        """Make a symbolic link; count one lookup of it."""
        return self._make(
            parent_id,
            name,
            0,
            caller,
            lambda entry, _: os.symlink(target, entry.name or b"", dir_fd=entry.dir_fd),
        )

    def _make(
        self,
        parent_id: int,
        name: bytes,
        mode: int,
        caller: Credentials,
        make: Callable[[PathHandle, int], None],
    ) -> Attr:
        parent = self._nodes.get(parent_id)
        with self._state.gate:
            entry = _new_entry_of(self._state, parent, name)
            self._before_making(parent, entry)
            masked = self._masked(parent, entry, mode, caller)

            # With the caller's ids, so that quota, setgid directories and default ACLs apply as in a plain
            # directory.
            def change() -> None:
                with acting_as(caller):
                    make(entry, masked)

            self._state.with_space(change)
            return self._adopt_made(parent, name, entry.stat)[1]

    def _adopt_made(self, parent: Node, name: bytes, read: Callable[[], os.stat_result]) -> tuple[Node, Attr]:
        """Return the node of an inode that was just made under a name; one lookup is counted."""
        node, attr = self._state.adopt(parent, name, read, count=1)
        self._state.recent.made(node)
        self._made(parent, name, node)
        self._state.names_changed(parent)
        return node, attr

    def _masked(self, parent: Node, entry: PathHandle, mode: int, caller: Credentials) -> int:
        """Return the mode under the caller's umask, unless the directory has a default ACL (POSIX.1e draft 17, 23.1.2)."""
        # The kernel passes the umask on, because the mount has MS_POSIXACL: only the server knows of a
        # default ACL.
        if not caller.umask:
            return mode
        # A look for the ACL at each creation would cost a system call: directories without one are
        # remembered.
        if parent.id in self._nodes.without_default_acl:
            return mode & ~caller.umask
        try:
            os.getxattr(b"/proc/self/fd/%d/." % entry.dir_fd, _DEFAULT_ACL)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
            self._nodes.without_default_acl.add(parent.id)
            return mode & ~caller.umask
        return mode

    def create(
        self, parent_id: int, name: bytes, mode: int, flags: int, caller: Credentials
    ) -> tuple[Attr, int]:
        """Create and open a file; return its attributes and the handle, and count one lookup."""
        parent = self._nodes.get(parent_id)
        # Before the creation: a refused open(2) creates nothing.
        self._state.allowances.descriptors.check(caller.uid)
        with self._state.gate:
            entry = _new_entry_of(self._state, parent, name)
            is_new = self._is_new(parent, entry)
            masked = self._masked(parent, entry, mode, caller)
            # The mode may forbid the caller to read the file; this descriptor serves reads as well.
            want = backing_flags(flags) | os.O_CREAT
            # O_EXCL where the name was found free: a file that another process made meanwhile must not count
            # as created here.
            try:
                fd = self._created(entry, want | (os.O_EXCL if is_new else flags & os.O_EXCL), masked, caller)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
                is_new, fd = False, self._created(entry, want, masked, caller)
            file = OpenFile(parent, fd, flags, caller.uid)
            read = partial(os.fstat, fd)
            if is_new:
                file.node, attr = self._adopt_made(parent, name, read)
            else:
                file.node, attr = self._state.adopt(parent, name, read, count=1)
            return attr, self._state.add_file(file)

    def _created(self, entry: PathHandle, flags: int, mode: int, caller: Credentials) -> int:
        create = partial(os.open, entry.name or b"", flags, mode, dir_fd=entry.dir_fd)
        if caller.uid == 0 and caller.gid == 0:
            return self._state.with_space(create)

        def change() -> int:
            with acting_as(caller):
                return create()

        # Outside `acting_as`: the undo log's space is freed by root, not by the caller.
        return self._state.with_space(change)

    def tmpfile(self, parent_id: int, mode: int, flags: int, caller: Credentials) -> tuple[Attr, int]:
        """Create and open a file without a name (O_TMPFILE); return its attributes and the handle, and count one lookup."""
        parent = self._nodes.get(parent_id)
        entry = PathHandle(self._nodes.directory(parent), b".")
        self._state.allowances.descriptors.check(caller.uid)
        with self._state.gate:
            masked = self._masked(parent, entry, mode, caller)
            want = backing_flags(flags) | os.O_TMPFILE | (flags & os.O_EXCL)

            def change() -> int:
                with acting_as(caller):
                    return os.open(b".", want & ~os.O_NOFOLLOW, masked, dir_fd=entry.dir_fd)

            file = OpenFile(parent, self._state.with_space(change), flags, caller.uid)
            st = os.fstat(file.fd)
            # A file without a name needs a hidden link at once: a successor could not find it by anything
            # else.
            file.node = self._nodes.adopt_nameless(st)
            self._state.hidden.keep_orphan(st.st_ino, b"/proc/self/fd/%d" % file.fd, None, follow=True)
            attr = Attr(file.node.id, 0, st, st.st_nlink, written=writes(flags))
            return attr, self._state.add_file(file)

    def link(self, node_id: int, new_parent_id: int, new_name: bytes) -> Attr:
        """Give an inode one more name; count one lookup of it."""
        node, parent = self._nodes.get(node_id), self._nodes.get(new_parent_id)
        state = self._state
        with state.gate:
            entry = _new_entry_of(self._state, parent, new_name)
            source, nameless = self._source_of_link(node)
            state.keep_inode(node)
            self._before_making(parent, entry)
            path = b"/proc/self/fd/%d" % source.fd
            state.with_space(lambda: os.link(path, new_name, dst_dir_fd=entry.dir_fd, follow_symlinks=True))
            self._linked(node, parent, new_name, nameless=nameless)
            attr = state.adopt(parent, new_name, entry.stat, count=1)[1]
            if nameless:
                # After the name is in the journal: until then a successor finds the file by the hidden link
                # alone.
                state.hidden.let_orphan_go(node.ino)
            state.names_changed(parent)
            return attr

    def _source_of_link(self, node: Node) -> tuple[Descriptor, bool]:
        """Return a descriptor of the inode that gets one more name, and whether it has none, because O_TMPFILE made it.

        Raises:
            FileNotFoundError: the file has lost its last name, as link(2) refuses it.
        """
        # A descriptor, never a name alone: another thread may rename something else to the name.
        file = self._state.any_file(node)
        if node.parent is None and file is not None:
            return Descriptor(os.dup(file.fd)), True
        if self._nodes.path_handle(node).name is None and not node.astray:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._nodes.pin(node), False

    # -- removing -----------------------------------------------------------------------------------

    def unlink(self, parent_id: int, name: bytes) -> None:
        """Remove the name of anything but a directory."""
        self._remove(parent_id, name, lambda entry: os.unlink(entry.name or b"", dir_fd=entry.dir_fd))

    def rmdir(self, parent_id: int, name: bytes) -> None:
        """Remove an empty directory."""
        self._remove(parent_id, name, lambda entry: os.rmdir(entry.name or b"", dir_fd=entry.dir_fd))

    def _remove(self, parent_id: int, name: bytes, remove: Callable[[PathHandle], None]) -> None:
        parent = self._nodes.get(parent_id)
        with self._state.gate:
            entry = _entry_of(self._state, parent, name)
            target = self._target(entry)
            self._state.keep_name(parent, entry, target.st)
            with _Leaving(self._state, target):
                keep = self._keep_removed(target, entry)
                # Before the system call, and for every inode that the kernel knows: a successor that did not know
                # of a removal gave the next file with the same inode number the same node (ESTALE and wrong link
                # counts, once in 1,500 kills).
                if target.is_remembered:
                    _note_changing(
                        self._nodes.journal, parent, name, target.st.st_ino, goes=target.remembered
                    )
                try:
                    self._state.with_space(lambda: remove(entry))
                except OSError:
                    if target.is_remembered:
                        _note_unchanged(self._nodes.journal, parent, name)
                    raise
                self._removed(parent, name, target)
                self._unbound(parent, name, target, keep)
            self._state.names_changed(parent)

    def _target(self, entry: PathHandle) -> Target:
        # Before keep_name, which may add a hidden link.
        st, nlink = self._state.links(entry.stat)
        return Target(st, nlink, self._nodes.find(st))

    def _keep_removed(self, target: Target, entry: PathHandle) -> Descriptor | None:
        """Return a descriptor of an inode that is about to lose a name; None where the kernel cannot ask about it later."""
        node = target.node
        # Other names help a successor only where one is known here: the kernel may have forgotten the others.
        if target.may_be_open and (target.nlink <= 1 or (node is not None and not node.aliases)):
            assert node is not None
            node.kept = node.handles is None
            self._state.hidden.keep_orphan(node.ino, entry.name or b"", entry.dir_fd, follow=False)
        # Measured with a descriptor kept: the space of a removed checkpoint (256 MiB, ext4) came back 360 ms
        # after unlink(2). Freed inside the call it takes as long as in a plain directory, and other requests
        # go on meanwhile.
        if target.frees_much:
            # A descriptor would keep the space until the kernel forgets the node, which is after unlink(2)
            # has returned.
            self.before_freeing()
            return None
        # With another name a large file's space is not freed now. It must be when that name goes, which only a node that
        # the kernel can forget ensures.
        if node is None or not node.lookups or (target.is_large and not node.is_counted):
            return None
        return Descriptor(os.open(entry.name or b"", PIN, dir_fd=entry.dir_fd))

    def _unbound(self, parent: Node, name: bytes, target: Target, keep: Descriptor | None) -> None:
        """Update the tables of an inode that lost this name."""
        gone = stat.S_ISDIR(target.st.st_mode) or target.nlink <= 1
        if target.node is not None:
            self._nodes.unlinked(target.node, parent, name, gone=gone, keep=keep, last=target.st)
        self._lost_name(target, gone=gone)

    # -- renaming -----------------------------------------------------------------------------------

    def rename(self, parent_id: int, name: bytes, new_parent_id: int, new_name: bytes, flags: int) -> None:
        """Rename as rename(2) or, with flags, as renameat2(2)."""
        parent, new_parent = self._nodes.get(parent_id), self._nodes.get(new_parent_id)
        state = self._state
        with state.gate:
            entry = _entry_of(state, parent, name)
            new_entry = _new_entry_of(state, new_parent, new_name)
            source, replaced = self._target(entry), self._target_or_none(new_entry)
            if replaced is not None and source.key == replaced.key and not flags:
                # Two names of one file: rename(2) does nothing.
                return
            exchange = bool(flags & syscalls.RENAME_EXCHANGE)
            state.keep_name(parent, entry, source.st, moved=True)
            state.keep_name(new_parent, new_entry, replaced.st if replaced else None, moved=exchange)
            goes = replaced if not exchange else None
            with _Leaving(state, goes):
                keep = self._keep_removed(goes, new_entry) if goes is not None else None
                _note_changing(
                    self._nodes.journal, parent, name, source.st.st_ino, to=(new_parent, new_name),
                    replaced=replaced.st.st_ino if replaced is not None else 0, exchange=exchange,
                    goes=goes.remembered if goes is not None else None,
                )  # fmt: skip
                try:
                    state.with_space(lambda: _rename(entry, new_entry, flags))
                except OSError:
                    _note_unchanged(self._nodes.journal, parent, name, to=(new_parent, new_name))
                    raise
                for directory in {parent, new_parent}:
                    state.names_changed(directory)
                for moved in (source, replaced if exchange else None):
                    if moved is not None and moved.node is not None:
                        state.recent.changed(moved.node)
                if exchange and replaced is not None:
                    # The first one last: its record settles the change, so a successor that has this record has both.
                    if replaced.node is not None:
                        self._nodes.renamed(replaced.node, new_parent, new_name, parent, name)
                    if source.node is not None:
                        self._nodes.renamed(source.node, parent, name, new_parent, new_name)
                    self._exchanged((parent, name, source), (new_parent, new_name, replaced))
                    return
                if replaced is not None:
                    self._unbound(new_parent, new_name, replaced, keep)
                if source.node is not None:
                    self._nodes.renamed(source.node, parent, name, new_parent, new_name)
                self._moved(parent, name, source, new_parent, new_name, replaced)
                if flags & syscalls.RENAME_WHITEOUT:
                    # The file system has made a new inode under the old name, whose lookup the kernel does not
                    # count.
                    self._nodes.forget(self._adopt_made(parent, name, entry.stat)[0].id, 1)

    def _target_or_none(self, entry: PathHandle) -> Target | None:
        try:
            return self._target(entry)
        except FileNotFoundError:
            return None


class _Leaving:
    """Span in which an inode loses a name; an open of it waits for the end (`Files.open`)."""

    __slots__ = ("_leaving", "_lock", "_node")

    def __init__(self, state: PassthroughState, target: Target | None) -> None:
        self._leaving, self._lock = state.leaving, threading.Lock()
        self._node = target.node.id if target is not None and target.node is not None else 0

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._node:
            self._leaving[self._node] = self._lock

    def __exit__(self, *_error: object) -> None:
        # Another name of the inode may be leaving as well.
        if self._leaving.get(self._node) is self._lock:
            del self._leaving[self._node]
        self._lock.release()


class Target(NamedTuple):
    """Inode that a name is bound to, with the link count that users see."""

    st: os.stat_result
    nlink: int
    node: Node | None

    @property
    def key(self) -> tuple[int, int]:
        """Device and inode number."""
        return self.st.st_dev, self.st.st_ino

    @property
    def remembered(self) -> tuple[Node, os.stat_result] | None:
        """Node and attributes, where the kernel knows the inode."""
        return None if self.node is None else (self.node, self.st)

    @property
    def may_be_open(self) -> bool:
        """True if a program may have the file open. The kernel opens pipes and devices without a request."""
        if self.node is None:
            return False
        return self.node.handles is not None or (
            bool(self.node.lookups) and stat.S_IFMT(self.st.st_mode) in _OPENED_BY_THE_KERNEL
        )

    @property
    def is_large(self) -> bool:
        """True for a file whose space must be free when its last name is gone."""
        return stat.S_ISREG(self.st.st_mode) and self.st.st_blocks * 512 >= _FREED_AT_ONCE_BYTES

    @property
    def frees_much(self) -> bool:
        """True if this is the last name of a large file that no program has open."""
        return self.is_large and self.nlink <= 1 and (self.node is None or self.node.handles is None)

    @property
    def is_remembered(self) -> bool:
        """True if the kernel may still ask for the inode, which it remembers until it is told of the removal.

        A successor that took a new file with the same number for it would give two files one node.
        """
        return self.node is not None


def _rename(entry: PathHandle, new_entry: PathHandle, flags: int) -> None:
    old, new = entry.name or b"", new_entry.name or b""
    if flags:
        syscalls.renameat2(entry.dir_fd, old, new_entry.dir_fd, new, flags)
    else:
        os.rename(old, new, src_dir_fd=entry.dir_fd, dst_dir_fd=new_entry.dir_fd)
