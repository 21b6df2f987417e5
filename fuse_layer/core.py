"""The overlay core: one protected root as a set of file system operations, synchronous, thread-safe, knowing
no driver.

A driver translates requests into these methods and OSError into its replies. Nodes and handles are integers;
names, link targets and attribute names are bytes; attributes are ``os.stat_result``. What follows from which
module:

* nodes.py, node_ways.py   what the kernel remembers, and the way to it
* namespace.py, data.py, attributes.py, directories.py   the operations
* gate.py, tracking.py, undo.py, epochs.py   the cut: holding, dirty tracking, what sealed epochs still need,
  their life

Methods that may take long: ``fsync``, ``read`` of what is not in memory, and every changing operation while
``pending`` is true (it may copy old blocks). A driver runs them where other requests do not wait. GateHeld
(gate.py) is raised by changing operations only in the thread that the driver registered as ``inline_thread``.

The serving process must have umask 0: modes arrive with the caller's umask applied or beside them
(Caller.umask)."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Any, Final

import structlog

from ciuic import state_directory
from ciuic.fuse_layer import syscalls
from ciuic.fuse_layer.attributes import Attributes, SetAttr
from ciuic.fuse_layer.caller import Caller
from ciuic.fuse_layer.data import Data
from ciuic.fuse_layer.directories import Directories
from ciuic.fuse_layer.epochs import Cut, Epochs, read_saved, write_saved
from ciuic.fuse_layer.gate import GateHeld, HoldExpired
from ciuic.fuse_layer.ledger import Inherited
from ciuic.fuse_layer.ledger_writer import Ledger
from ciuic.fuse_layer.namespace import Namespace
from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.nodes import ROOT_ID, NodeTable
from ciuic.fuse_layer.open_rules import OpenRules, Wish
from ciuic.fuse_layer.settling import settle
from ciuic.fuse_layer.spare import Spare
from ciuic.fuse_layer.state import Attr, OverlayState
from ciuic.fuse_layer.times import KernelTimes
from ciuic.fuse_layer.tracking import Tracker
from ciuic.fuse_layer.undo import UndoLog
from ciuic.fuse_layer.unseen import UnseenWriters
from ciuic.fuse_layer.ways import Descriptor

log = structlog.get_logger(__name__)

__all__ = ["ROOT_ID", "Attr", "Caller", "Cut", "GateHeld", "HoldExpired", "OverlayCore", "SetAttr"]

_TRACKING_NAME: Final = b"tracking"
_SUCCESSION_NAME: Final = b"succession"
_NOWHERE_NAME: Final = b"nowhere"
DEFAULT_UNDO_LIMIT_BYTES: Final = 1 << 40


class OverlayCore:
    """One root. ``backing_fd`` (O_PATH suffices) was opened before anything was mounted over it, and stays
    the caller's.

    ``kernel_keeps_times``: the driver lets the kernel cache writes (times.py).

    Opening empties the undo directory, and takes up tracking that a clean stop saved.

    Raises:
        OSError: the state directory cannot be made (read-only or full file system).
        CiuicError: its name is taken (state_directory.open_state).
    """

    def __init__(
        self,
        backing_fd: int,
        *,
        session: str,
        block_size: int = 262144,
        undo_limit_bytes: int = DEFAULT_UNDO_LIMIT_BYTES,
        kernel_keeps_times: bool = False,
        ledger: Ledger | None = None,
        inherited: Inherited | None = None,
        plain: bool = False,
        rules: OpenRules | None = None,
    ) -> None:
        self._state_fd, self._set_aside = state_directory.open_state(backing_fd)
        for name in self._set_aside:
            log.error("reserved_name_set_aside", new_name=os.fsdecode(name))
        self._plain = plain
        self._removed: dict[tuple[int, int, int], Descriptor] = {}
        nodes = NodeTable(backing_fd)
        left = read_saved(self._state_fd, _SUCCESSION_NAME)  # true for the very next process only
        undo = UndoLog(
            self._state_fd,
            block_size=block_size,
            limit_bytes=undo_limit_bytes,
            on_abandon=self._on_abandon,
            # A predecessor that left its session gave its epochs up; one that was killed left them on disk.
            inherit=inherited is not None and left is None and not plain,
        )
        hidden = int(state_directory.lies_inside(backing_fd))
        self._state = OverlayState(nodes, Tracker(block_size), undo, plain=plain, hidden_directories=hidden)
        nodes.on_dropped = undo.hidden.let_orphan_go
        limit = self._state.allowances.limit
        nodes.keep_at_most(limit)
        undo.most_directories = min(undo.most_directories, limit // 8)
        self._rules = rules or OpenRules()
        self._rules.load(self._state_fd)
        self._unseen = UnseenWriters(self._state, on_stayed=self._rules.note_stayed)
        if ledger is not None:
            undo.hidden.keep_orphans_in(self._state_fd, inherited=inherited is not None)
        self._epochs = Epochs(self._state, self._unseen, session=session)
        self._spare = Spare(undo, self._open_inodes)
        self._kernel_keeps_times = kernel_keeps_times
        self.block_size = block_size
        self.session = session
        saved = read_saved(self._state_fd, _TRACKING_NAME)
        if inherited is not None and left is not None:
            self.session = self._epochs.load_session(left) or session
        elif undo.inherited is not None:
            self.session = self._epochs.adopt(undo.inherited)
            log.info("epochs_inherited", epochs=undo.pending, records=len(undo.inherited.names))
        elif saved is not None:
            self._epochs.load(saved)
        self._bind()
        nodes.ledger = ledger
        if inherited is not None:
            self._inherit(inherited)

    def _inherit(self, inherited: Inherited) -> None:
        """Take over what the kernel remembers of a predecessor, whose handles keep their numbers. What cannot be opened any
        more answers EBADF (``has_file``)."""
        self._state.nodes.nowhere = self._nowhere
        self._state.nodes.inherit(inherited)
        settle(self._state.nodes, inherited.changes, self._is_gone)
        self._state.inherit_handles(inherited.last_handle)
        lost = 0
        for opened in inherited.files.values():
            try:
                self._data.inherit(
                    opened.handle, opened.node, opened.flags, unseen=opened.unseen, uid=opened.uid
                )
            except OSError as error:
                log.error("handle_lost", node=opened.node, error=str(error))
                lost += 1
        for directory in inherited.directories.values():
            names = inherited.listings.get(directory.handle)
            try:
                self._listings.inherit(directory.handle, directory.node, names, uid=directory.uid)
            except OSError:
                lost += 1
        for node_id in inherited.lingering:
            self._unseen.inherit(node_id)
        if lost:
            log.error("handles_lost", count=lost)

    @property
    def on_listing(self) -> Callable[[int, list[bytes]], None]:
        """Told the names that the offsets of a directory handle count from now on."""
        return self._listings.on_listing

    @on_listing.setter
    def on_listing(self, told: Callable[[int, list[bytes]], None]) -> None:
        self._listings.on_listing = told

    def _bind(self) -> None:
        """The operations, each documented in its module."""
        times = KernelTimes(self._state, active=self._kernel_keeps_times)
        names, data = Namespace(self._state), Data(self._state, times, self._unseen)
        self._data, self._names = data, names
        attributes, directories = Attributes(self._state, data, times), Directories(self._state)
        self._listings = directories
        self.lookup, self.forget, self.readlink = names.lookup, names.forget, names.readlink
        self.mkdir, self.mknod, self.symlink = names.mkdir, names.mknod, names.symlink
        self.create, self.link, self.rename = names.create, names.link, names.rename
        self.tmpfile = names.tmpfile
        self.unlink, self.rmdir = names.unlink, names.rmdir
        self.open, self.release, self.flush, self.fsync = data.open, data.release, data.flush, data.fsync
        self.read, self.read_nowait, self.write = data.read, data.read_nowait, data.write
        self.fallocate, self.lseek, self.copy_file_range = data.fallocate, data.lseek, data.copy_file_range
        self.share, self.is_unseen = data.share, data.is_unseen
        self.getattr, self.setattr, self.statx = attributes.getattr, attributes.setattr, attributes.statx
        self.getxattr, self.listxattr = attributes.getxattr, attributes.listxattr
        self.setxattr, self.removexattr = attributes.setxattr, attributes.removexattr
        self.opendir, self.releasedir = directories.opendir, directories.releasedir
        self.readdir, self.list_names = directories.readdir, directories.list_names
        self.fsyncdir, self.remember = directories.fsyncdir, directories.remember
        self.hold, self.release_hold = self._epochs.hold, self._epochs.release
        self.committed, self.abort = self._epochs.committed, self._epochs.abort

    # -- for drivers --------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a sealed epoch awaits capture: changing operations may then copy old content first."""
        return self._state.undo.active

    @property
    def inline_thread(self) -> int | None:
        """The thread (threading.get_ident) that must not wait for a cut; see gate.py."""
        return self._state.gate.inline_thread

    @inline_thread.setter
    def inline_thread(self, ident: int | None) -> None:
        self._state.gate.inline_thread = ident

    @property
    def open_files(self) -> int:
        return len(self._state.files)

    def statfs(self) -> os.statvfs_result:
        """The backing file system's figures. What the undo log takes counts as free: it is given up before
        the job runs short."""
        spare = self._spare.room()
        real = os.statvfs(self._state.nodes.root_directory.fd)
        if not spare.inodes:
            return real
        values, blocks = list(real), spare.size_bytes // real.f_frsize
        for at, more in ((3, blocks), (4, blocks), (6, spare.inodes), (7, spare.inodes)):
            values[at] += more  # f_bfree, f_bavail, f_ffree, f_favail
        return os.statvfs_result(values)

    @property
    def held_by_kernel(self) -> Callable[[int], bool]:
        """Whether the kernel itself has a node's backing file open; set by a driver that lets it."""
        return self._state.held_by_kernel

    @held_by_kernel.setter
    def held_by_kernel(self, told: Callable[[int], bool]) -> None:
        self._state.held_by_kernel = told

    def has_file(self, handle: int) -> bool:
        """Whether the handle leads to an open file; of a predecessor's it may not."""
        return handle in self._state.files

    def has_directory(self, handle: int) -> bool:
        """The same for a directory."""
        return self._listings.has(handle)

    def descriptor(self, handle: int) -> int:
        """The backing descriptor of an open handle; it closes with the handle."""
        return self._state.file(handle).fd

    @property
    def before_freeing(self) -> Callable[[], None]:
        """Called before a removal that frees much space; a driver lets other requests go on."""
        return self._names.before_freeing

    @before_freeing.setter
    def before_freeing(self, call: Callable[[], None]) -> None:
        self._names.before_freeing = call

    def needs_no_flush(self, handle: int) -> None:
        """Nothing that is written through the handle waits in the kernel's cache."""
        self._state.file(handle).flushes = False

    def prepare_cut(self, timeout_seconds: float) -> None:
        """Before a hold, outside it; see UnseenWriters.prepare."""
        self._unseen.prepare(timeout_seconds)

    def is_seen(self, handle: int) -> None:
        """It was opened as unseen, and will not be."""
        self._unseen.discard(handle, self._state.file(handle))

    def wish(self, node_id: int, flags: int, *, fresh: bool) -> Wish:
        """Ask the rules for the way of an open of the node, where its family is not decided yet."""
        node = self._state.nodes.get(node_id)
        return self._rules.wish(node.name, node.ino, flags, lambda: self._state.attr(node).st, fresh=fresh)

    def note_joined(self, node_id: int) -> None:
        """Note that the node was opened read-write beside readers that pass the worker by."""
        self._rules.note_joined(self._state.nodes.get(node_id).ino)

    def peek(self, parent_id: int, name: bytes) -> int:
        """The inode number under a name; no lookup is counted. FileNotFoundError when it is free."""
        directory = self._state.nodes.directory(self._state.nodes.get(parent_id))
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_ino

    def dot(self, node_id: int, name: bytes) -> int:
        """The node id of "." or ".." in a directory. No lookup is counted."""
        node = self._state.nodes.get(node_id)
        return (node if name == b"." else node.parent or self._state.nodes.root).id

    def syncfs(self) -> None:
        """Everything on the backing file system is durable on return."""
        syscalls.syncfs(self._state_fd)

    # -- for control --------------------------------------------------------------------------------

    def cut(self, timeout_seconds: float = 5.0) -> Cut:
        """Hold, cut, let go, and write the sealed file: a whole cut of this root alone."""
        token = self.hold(timeout_seconds)
        try:
            cut = self.cut_held(token)
        finally:
            self.release_hold(token)
        self.seal(cut.epoch)
        return cut

    def seal(self, epoch: int) -> None:
        """Write the sealed file of an epoch that was cut; see Epochs.seal."""
        self._epochs.seal(epoch)
        self._rules.save(self._state_fd)

    def writers(self) -> list[bytes]:
        """Paths below the root, one for each file with a handle that can write. The kernel may hold unwritten
        pages of these."""
        nodes = {file.node.id: file.node for file in list(self._state.files.values()) if file.flushes}
        paths = (self._state.nodes.path_below_root(node) for node in nodes.values())
        return [path for path in paths if path]

    def status(self) -> dict[str, Any]:
        """Plain values for the control channel's ``status`` (docs/architecture.md §3)."""
        self._epochs.tidy()
        self._unseen.measure()
        current = self._state.tracker.current
        return {
            "session": self.session,
            "epoch": self._state.tracker.epoch,
            "pending": self._state.undo.pending,
            "since": self._epochs.since,
            "complete": current.complete,
            "dirty_bytes": current.dirty_bytes(self.block_size),
            "dirty_inodes": len(current.changes),
            "undo_bytes": self._state.undo.bytes_kept if self.pending else 0,
            "open_files": self.open_files,
            "nodes": len(self._state.nodes),
            "abandoned": [entry._asdict() for entry in self._epochs.abandoned],
            "set_aside": list(self._set_aside),
        }

    @property
    def undo_fd(self) -> int:
        """Descriptor of the directory that holds the undo log; it stays the core's."""
        return self._state.undo.directory_fd

    def save_tracking(self) -> None:
        """For a clean stop, when no operation comes any more: pending epochs are given up into the current
        one, which is saved durably."""
        self._epochs.give_up_all()
        self._rules.save(self._state_fd)
        write_saved(self._state_fd, _TRACKING_NAME, self._epochs.dump())

    def cut_held(self, token: int) -> Cut:
        """End the epoch under a hold; see Epochs.cut. OSError (EOPNOTSUPP) where nothing is tracked."""
        if self._plain:
            raise OSError(
                errno.EOPNOTSUPP, "this root is served without snapshots, because its workers kept dying"
            )
        return self._epochs.cut(token)

    def pin_orphans(self) -> None:
        """Prepare for another session beside this one, which is detached and serves what is open (HiddenLinks.pin_orphans)."""
        self._state.undo.hidden.pin_orphans()

    def save_for_successor(self) -> None:
        """As ``save_tracking``, when no operation is in work and none will be: the successor's session is this one, and it
        knows what has changed since the last snapshot."""
        self._epochs.give_up_all()
        write_saved(self._state_fd, _SUCCESSION_NAME, self._epochs.dump_session())

    def close(self) -> None:
        """Let go of every descriptor; open handles are closed. The core is not used afterwards."""
        self._state.files.clear()
        self._unseen.close()
        self._state.undo.hidden.let_orphans_go()
        os.close(self._state_fd)

    def _nowhere(self, facts: tuple[int, int, int]) -> Descriptor:
        """A removed directory of this mode, owner and group, the same for all. The kernel judges who may do what in it."""
        found = self._removed.get(facts)
        if found is None:
            mode, uid, gid = facts
            with contextlib.suppress(FileExistsError):
                os.mkdir(_NOWHERE_NAME, 0o700, dir_fd=self._state_fd)
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            found = self._removed[facts] = Descriptor(os.open(_NOWHERE_NAME, flags, dir_fd=self._state_fd))
            path = b"/proc/self/fd/%d" % found.fd
            os.chown(path, uid, gid)
            os.chmod(path, stat.S_IMODE(mode))
            os.rmdir(_NOWHERE_NAME, dir_fd=self._state_fd)
        return found

    def _is_gone(self, node: Node) -> bool:
        """Whether the inode of a node whose only known name was removed has no name left."""
        orphan = self._state.undo.hidden.find_orphan(node.ino)
        if orphan is None:
            return True  # nobody has it open: whoever finds it by another name finds it anew
        st = os.fstat(orphan.fd)
        return st.st_nlink <= self._state.undo.hidden.of(node.ino)

    def _open_inodes(self) -> set[int]:
        return {file.node.ino for file in list(self._state.files.values())}

    def _on_abandon(self, epochs: list[int], reason: str) -> None:
        self._epochs.on_abandon(epochs, reason)
