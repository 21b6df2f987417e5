"""Operations that find and make names: lookup, create, link.

Guarantees: a new file belongs to the caller (caller.py); names on the backing file system change by exactly
one system call each, so a crash leaves either state; the reserved name can neither be seen nor made.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

from ciuic.fuse_layer.core.entries import adopt_created, entry_of, lstat_or_none, new_entry_of
from ciuic.fuse_layer.core.open_flags import backing_flags, writes
from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import Attr, OpenFile, OverlayState
from ciuic.fuse_layer.system.caller import Credentials, acting_as
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle
from ciuic.fuse_layer.tracking.tracking import ABSENT

_DEFAULT_ACL = "system.posix_acl_default"


class Namespace:
    """Operations of one root that find or make names."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self._nodes = state.nodes

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
        return self._state.adopt(parent, name, entry_of(self._state, parent, name).stat, count=1)[1]

    def _counted(self, node: Node) -> Attr:
        attr = self._state.attr(node)
        self._nodes.remember(node.id)
        return attr

    def forget(self, node_id: int, count: int) -> None:
        """Take ``count`` lookups back, which the kernel has dropped."""
        self._nodes.forget(node_id, count)

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
            entry = new_entry_of(self._state, parent, name)
            # Where the name is taken nothing will change: EEXIST.
            if lstat_or_none(entry) is None:
                self._state.keep_name(parent, entry, None)
            masked = self._masked(parent, entry, mode, caller)

            # With the caller's ids, so that quota, setgid directories and default ACLs apply as in a plain
            # directory.
            def change() -> None:
                with acting_as(caller):
                    make(entry, masked)

            self._state.with_space(change)
            return adopt_created(self._state, parent, name, entry.stat)[1]

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
            entry = new_entry_of(self._state, parent, name)
            # The kernel creates names that it believes to be free. Whether it is right matters before the
            # creation only where the binding has to be saved: one system call less otherwise.
            is_new = not self._state.undo.active or lstat_or_none(entry) is None
            if is_new:
                self._state.keep_name(parent, entry, None)
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
                file.node, attr = adopt_created(self._state, parent, name, read)
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
            self._state.undo.hidden.keep_orphan(st.st_ino, b"/proc/self/fd/%d" % file.fd, None, follow=True)
            attr = Attr(file.node.id, 0, st, st.st_nlink, written=writes(flags))
            return attr, self._state.add_file(file)

    def link(self, node_id: int, new_parent_id: int, new_name: bytes) -> Attr:
        """Give an inode one more name; count one lookup of it."""
        node, parent = self._nodes.get(node_id), self._nodes.get(new_parent_id)
        state = self._state
        with state.gate:
            entry = new_entry_of(self._state, parent, new_name)
            source, nameless = self._source_of_link(node)
            state.keep_inode(node)
            if lstat_or_none(entry) is None:
                state.keep_name(parent, entry, None)
            path = b"/proc/self/fd/%d" % source.fd
            state.with_space(lambda: os.link(path, new_name, dst_dir_fd=entry.dir_fd, follow_symlinks=True))
            if state.tracked(parent) and nameless:
                # Made by O_TMPFILE, so it is in no snapshot yet.
                state.tracker.mark_created(parent, new_name, node.ino)
            elif state.tracked(parent):
                state.tracker.mark_name(parent, new_name, ABSENT)
            if state.tracked(parent):
                # One name becomes several: each entry in the snapshot changes its form.
                for known_parent, known_name in node.names():
                    state.tracker.mark_touched(known_parent, known_name)
                state.tracker.mark_attrs(node)
            attr = state.adopt(parent, new_name, entry.stat, count=1)[1]
            if nameless:
                # After the name is in the journal: until then a successor finds the file by the hidden link
                # alone.
                state.undo.hidden.let_orphan_go(node.ino)
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
        if self._nodes.path_handle(node).name is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._nodes.pin(node), False
