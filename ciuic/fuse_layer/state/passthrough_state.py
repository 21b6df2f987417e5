"""State that the operation groups of a passthrough file system share: nodes, open handles, hidden links, allowances.

The file system serves a backing directory under the job's requests, and knows nothing of epochs. A state that tracks changes overrides
the hooks of `PassthroughState`. Their contract is the order of every changing operation:

1. enter ``gate``;
2. call ``keep_inode`` and ``keep_name`` for the inodes and names whose state is about to change;
3. change the backing file system, in ``with_space`` where that may need space;
4. mark what changed (``mark_attributes``, and the hooks of names.py), and mend the node table.

Steps 2 to 4 happen inside one stay in the gate. Content is marked before it changes, and under a lock together with the change (the
hooks of files.py).

A worker opens files for all users of a root, so that the kernel's limits, which are per process and per user,
do not tell them apart. `Allowances` divide its descriptors, handles and listed names: a user who holds much is
refused (EMFILE) while there is room for others, so that no user is refused because of what another one holds;
root and the owner of the root have a part of their own; a user who holds little is never refused for it. Readers
of one file share descriptors where it has many handles.

References:
    Choudhury and Hahne 1998, dynamic thresholds of shared packet buffers: a user may hold at most three times
    what is free. One user alone gets three quarters of it, two get three sevenths each, and something always
    remains for the next.

Changes of nodes by requests whose answers carry no attributes of theirs: of a directory whose names change, say.

The kernel drops its attributes of such a node when the request is answered. An answer to an older request (a lookup of the
directory, with its times from before) may reach the kernel's copy after that, because the thread that waits for it runs
late; the kernel would believe it for as long as the answer says. It drops an answer only where the node's ``attr_version``
has risen since the request (fs/fuse/inode.c, fuse_change_attributes), which a notification does and these changes do not.

So such a change takes back all answers from before it. A directory, which the kernel asks for mode and owner anew before each
further name then, is spared that: the first change after a quiet time takes answers back, and for some time its attributes are to be
told with a short life.

Guarantee: an answer with a long life is taken back by the next change.

Counts of what happens to names that the daemon waits for, such as the rename that completes a checkpoint.

The daemon gives the patterns and takes the counts away every second. Nothing is counted, and a change of a name pays for one look at
an attribute, where it waits for none.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import re
import resource
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer.state.node_table import Node, NodeTable
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle, stale
from ciuic.fuse_layer.tracking.hidden_links import HiddenLinks

QUIET_SECONDS: Final = 1.0
LIFE_NS: Final = 10_000_000
"""Life of the attributes of a directory that was changed lately."""


class _Generations(NamedTuple):
    since: float
    """Time at which ``now`` was empty, as of `time.monotonic`."""
    now: set[int]
    before: set[int]


class RecentChanges:
    """Directories of one root that were changed in the last one to two times ``QUIET_SECONDS``. Thread-safe."""

    def __init__(self) -> None:
        # Replaced as a whole, without a lock. Where two threads do so at a time directories may be missed, whose next change
        # then takes answers back once more. A change is noted where it is in ``now``, attributes live long where it is in
        # neither: a second passes between the two, whichever thread looks first.
        self._kept = _Generations(time.monotonic(), set(), set())
        self.take_back: Callable[[int], None] = lambda node_id: None
        """Has the kernel drop the attributes of a node, and the answers to requests that it sent before."""

    def _generations(self) -> _Generations:
        kept, now = self._kept, time.monotonic()
        age = now - kept.since
        if age > QUIET_SECONDS:
            self._kept = kept = _Generations(now, set(), kept.now if age <= 2 * QUIET_SECONDS else set())
        return kept

    def changed(self, node: Node) -> None:
        """Note a change that was carried out, before the request is answered."""
        if node.is_dir:
            noted = self._generations().now
            if node.id in noted:
                return
            # In this order: attributes that are told meanwhile are of the time after the change, and live shortly.
            noted.add(node.id)
        self.take_back(node.id)

    def made(self, node: Node) -> None:
        """Note a new node, about which nothing was told yet."""
        if node.is_dir:
            self._generations().now.add(node.id)

    def __contains__(self, node_id: int) -> bool:
        kept = self._generations()
        return node_id in kept.now or node_id in kept.before


Matcher = Callable[[bytes], Any]


class NameEvents:
    """Counts by rule. Called by the threads that serve the job: a count may be one too low, and is never 0 after an event.

    Args:
        rules: (What happens: ``renamed``, ``appears`` or ``closed``; shell pattern of the name).
    """

    def __init__(self, rules: Sequence[tuple[str, str]]) -> None:
        self.rules = tuple(rules)
        self._counts = [0] * len(rules)
        self._lost = [0] * len(rules)
        self._any = self._of(None)
        self._renamed = self._of("renamed")
        self._appears = self._of("appears")
        self._closed = self._of("closed")

    def _of(self, kind: str | None) -> list[tuple[int, Matcher]]:
        return [
            (number, re.compile(os.fsencode(fnmatch.translate(pattern))).match)
            for number, (wanted, pattern) in enumerate(self.rules)
            if kind in (wanted, None)
        ]

    def renamed(self, name: bytes) -> None:
        """Count a rename to this name."""
        self._count(self._renamed, name)
        self._count(self._appears, name)

    def appeared(self, name: bytes) -> None:
        """Count a new name."""
        self._count(self._appears, name)

    def closed(self, name: bytes) -> None:
        """Count the end of a handle that could write."""
        self._count(self._closed, name)

    def lost(self, name: bytes) -> None:
        """Count the removal of a file that was in no cut."""
        for number, matches in self._any:
            if matches(name):
                self._lost[number] += 1

    def _count(self, rules: list[tuple[int, Matcher]], name: bytes) -> None:
        for number, matches in rules:
            if matches(name):
                self._counts[number] += 1

    def take(self) -> tuple[list[int], list[int]]:
        """Return the counts of events and of lost files since the last call."""
        counts, self._counts = self._counts, [0] * len(self.rules)
        lost, self._lost = self._lost, [0] * len(self.rules)
        return counts, lost


_LOOKED_AT_ONCE: Final = 32
"""Names of a listing that are looked at before their nodes are made, with one lock and one record for all."""
_SHARE_OF_FREE: Final = 3
_PRIVILEGED_PART: Final = 8
"""Divisor of the total that gives the part of root and the owner of the root."""
_UNLIMITED: Final = 1 << 62
_MAX_SHARING_HANDLES: Final = 2 << 20
"""Limit of handles that share a descriptor: some 800 bytes of this process each."""
_MAX_LISTED_NAMES: Final = 20 << 20
"""Limit of names that open directories have in memory: some 100 bytes each."""
OWN_DESCRIPTORS: Final = 16
"""Handles of one file that have descriptors of their own before readers begin to share. A descriptor carries
the kernel's read-ahead, which several streams would disturb; beyond this number sharing matters more."""
_RESERVED_DESCRIPTORS: Final = 2048
"""Descriptors for this process itself: cached directories, undo log, sockets, requests in work."""


class Quota:
    """Quota of one kind of resource. Thread-safe.

    `check` comes before a unit is taken and `add` after it: threads that check at the same time may exceed a
    bound by as many units as there are threads.
    """

    def __init__(self, total: int = _UNLIMITED, *, owner: Callable[[], int] = lambda: 0) -> None:
        """Make a quota of ``total`` units for all users together; ``owner`` is asked for the owner of the root at a refusal."""
        self.total = total
        self._for_all = total - total // _PRIVILEGED_PART
        self._owner = owner
        # For counting alone: it is taken in every open(2) of the job.
        self._lock = threading.Lock()
        self._given_back: deque[tuple[int, int]] = deque()
        self._held: dict[int, int] = {}
        self._sum = 0

    def held(self, uid: int) -> int:
        """Return the units that a user holds."""
        with self._lock:
            self._settle()
            return self._held.get(uid, 0)

    def check(self, uid: int, units: int = 1) -> None:
        """Refuse a user who may not have more units.

        Raises:
            OSError: EMFILE where the user holds too much, ENFILE where nothing is left.
        """
        # Without the lock first: what was given back and is not counted yet can only make the answer too
        # strict.
        ordinary = self._for_all - self._sum
        if units <= ordinary and self._held.get(uid, 0) < _SHARE_OF_FREE * ordinary:
            return
        held = self.held(uid)
        # Once more after what was given back is counted.
        ordinary = self._for_all - self._sum
        if units <= ordinary and held < _SHARE_OF_FREE * ordinary:
            return
        # A directory with more names than the quota is listed all the same, once.
        if units > 1 and not held:
            return
        if units <= self.total - self._sum and uid in (0, self._owner()):
            return
        number = errno.EMFILE if held else errno.ENFILE
        raise OSError(number, os.strerror(number))

    def add(self, uid: int, units: int = 1) -> None:
        """Count units that a user has taken."""
        with self._lock:
            self._held[uid] = self._held.get(uid, 0) + units
            self._sum += units
            if self._given_back:
                self._settle()

    def remove(self, uid: int, units: int = 1) -> None:
        """Count units that a user no longer holds."""
        with self._lock:
            self._take_back(uid, units)

    def give_back(self, uid: int, units: int = 1) -> None:
        """Count units as `remove` does, from a finalizer: a garbage collection may come in the middle of `add`."""
        # No lock: the same thread may hold it. deque.append is atomic; `_settle` counts later.
        self._given_back.append((uid, units))

    def _settle(self) -> None:
        """Count what was given back. The caller holds the lock."""
        while self._given_back:
            self._take_back(*self._given_back.popleft())

    def _take_back(self, uid: int, units: int) -> None:
        self._sum -= units
        left = self._held.get(uid, 0) - units
        if left > 0:
            self._held[uid] = left
        else:
            self._held.pop(uid, None)


class SharedReader(Descriptor):
    """A descriptor for reading that several handles of one file and one user share; it counts in the user's quota once."""

    __slots__ = ("__weakref__", "_quota", "_uid")

    def __init__(self, fd: int, quota: Quota, uid: int) -> None:
        super().__init__(fd)
        self._quota = quota
        self._uid = uid
        quota.add(uid)

    def __del__(self) -> None:
        os.close(self.fd)
        self._quota.give_back(self._uid)


class Allowances:
    """Quotas of one worker. Thread-safe."""

    def __init__(self, owner: Callable[[], int] = lambda: 0) -> None:
        """Make the quotas; ``owner`` returns the user id of the root's owner."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = _UNLIMITED if limit == resource.RLIM_INFINITY else limit
        # Half of the limit where that is small: a reserve for this process must leave some for programs.
        self.descriptors = Quota(self.limit - min(_RESERVED_DESCRIPTORS, self.limit // 2), owner=owner)
        self.sharing = Quota(_MAX_SHARING_HANDLES, owner=owner)
        self.names = Quota(_MAX_LISTED_NAMES, owner=owner)
        self._shared: dict[tuple[int, int], weakref.ref[SharedReader]] = {}

    def shared_reader(self, node_id: int, uid: int, open_: Callable[[], int]) -> SharedReader:
        """Return the descriptor that this user's handles of a node share; ``open_`` opens the inode for reading only.

        It is never one that can write, nor one of another user, whose quota would be charged.
        """
        # A node's id means the same file for as long as a handle is open, also when the file gets another
        # inode (`TruncateSwaps` points the descriptors to that). Weak references: the descriptor closes with
        # the last handle, in whatever thread that is released.
        key = (node_id, uid)
        reference = self._shared.get(key)
        known = reference() if reference is not None else None
        if known is not None:
            return known
        made = SharedReader(open_(), self.descriptors, uid)
        self._shared[key] = weakref.ref(made, lambda gone: self._forget(key, gone))
        return made

    def _forget(self, key: tuple[int, int], gone: weakref.ref[SharedReader]) -> None:
        """Drop the entry of a descriptor that has closed.

        Called by a finalizer, in any thread at any moment: takes no lock.
        """
        if self._shared.get(key) is gone:
            self._shared.pop(key, None)


def _owner_of(directory_fd: int) -> Callable[[], int]:
    """Return a function that tells the owner of a directory, read at each call: chown(2) may change it."""
    return lambda: os.fstat(directory_fd).st_uid


_T = TypeVar("_T")


class Attr(NamedTuple):
    """Attributes of a node, as a lookup or getattr returns them."""

    node: int
    generation: int
    st: os.stat_result
    nlink: int
    """Link count without links of ours; use it in place of ``st.st_nlink``."""
    written: bool = False
    """True if a handle that can write is open: the blocks of ``st`` then change without a further request."""


class OpenFile:
    """An open handle and its backing descriptor.

    ``fd`` is readable and writable where the caller may write, and has neither O_APPEND nor O_DIRECT nor
    O_SYNC: with the kernel's write cache on, partial pages are read back through it and offsets come from the
    kernel. Only an append-only inode needs O_APPEND (``appends``); the kernel caches no write to that. The descriptor closes with the last reference to the object (a shared one: with the last object
    that has it), so a release never takes it from under another thread.
    """

    __slots__ = ("appends", "direct", "fd", "flushes", "maps", "node", "shared", "uid", "unseen", "writes")

    def __init__(self, node: Node, fd: int, flags: int, uid: int, shared: SharedReader | None = None) -> None:
        self.node = node
        self.fd = fd
        self.shared = shared
        """Owner of ``fd``, where that is not this object."""
        self.uid = uid
        """User who opened it, in whose quota it counts."""
        self.writes = flags & os.O_ACCMODE != os.O_RDONLY
        self.appends = bool(
            self.writes and flags & os.O_APPEND and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        )
        """True if the inode is append-only, so that ``fd`` writes at the end whatever the offset."""
        self.direct = self.appends or bool(self.writes and flags & os.O_DIRECT)
        """True if writes through it pass the kernel's cache by."""
        self.maps = flags & os.O_ACCMODE == os.O_RDWR
        """True if the program can map it shared and writable."""
        self.flushes = self.writes
        """True if data written through it may be in the kernel's cache alone until a flush."""
        self.unseen = False
        """True if writes through it may reach the backing file without a request (passthrough_writers.py)."""

    def __del__(self) -> None:
        if self.shared is None:
            os.close(self.fd)


MAX_COPIED_NAMES: Final = 1 << 16
"""Limit of the names that are remembered of the kernel's copies of listings, each listing counting as one more (some 5 MiB)."""


class CopyReader(NamedTuple):
    """A handle that may read the kernel's copy of a listing."""

    changes: int | None
    """`WatchedDirectory.changes` when it was opened; None where that was in a predecessor's time."""
    names: Sequence[bytes] | None
    """The listing that the copy was of then; None where it is not known."""
    removed: int | None = None
    """Names that may have gone between the opening and the predecessor's end; None where they were not counted."""


class WatchedDirectory:
    """An open directory. Fields other than ``changes`` change under the lock of `Directories`."""

    __slots__ = ("changes", "handles", "readers")

    def __init__(self) -> None:
        self.changes = 0
        """Number of changes of names since before the first handle was opened."""
        self.handles = 0
        """Number of open handles."""
        self.readers: dict[int, CopyReader] = {}
        """Handles that may read the kernel's copy of the listing."""


class CopiedListings:
    """Listings of which the kernel may have a copy, of directories that have not changed since: the latest ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listings: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        """Names by node, the latest listing last."""
        self._cost = 0

    def of(self, node_id: int) -> Sequence[bytes] | None:
        """Return the names of a directory's listing; None where it is not known."""
        return self._listings.get(node_id)

    def keep(self, node_id: int, names: Sequence[bytes]) -> None:
        """Remember a listing that is not too long, and forget the oldest ones beyond `MAX_COPIED_NAMES`."""
        with self._lock:
            self._pop(node_id)
            if len(names) >= MAX_COPIED_NAMES:
                return
            self._listings[node_id] = tuple(names)
            self._cost += len(names) + 1
            while self._cost > MAX_COPIED_NAMES:
                self._pop(next(iter(self._listings)))

    def forget(self, node_id: int) -> None:
        """Forget a listing: a name of the directory has changed."""
        # For most changes there is none, and the lock is spared.
        if node_id in self._listings:
            with self._lock:
                self._pop(node_id)

    def _pop(self, node_id: int) -> None:
        names = self._listings.pop(node_id, None)
        if names is not None:
            self._cost -= len(names) + 1


class PassthroughState:
    """State shared by the operation groups, and the hooks of a state that tracks changes; the module's docstring has their order."""

    def __init__(
        self,
        nodes: NodeTable,
        hidden: HiddenLinks,
        *,
        gate: AbstractContextManager[Any] | None = None,
        hidden_directories: int = 0,
    ) -> None:
        """Share these parts.

        Args:
            nodes: inodes that the kernel remembers.
            hidden: links that are not counted in link counts.
            gate: what every changing operation is inside of.
            hidden_directories: number of directories at the top of the root that are not counted in its links.
        """
        self._hidden_directories = hidden_directories
        self.nodes = nodes
        self.hidden = hidden
        self.links = hidden.links
        """Shortcut to HiddenLinks.links, which every answer with attributes calls: one call less."""
        self.gate: AbstractContextManager[Any] = nullcontext() if gate is None else gate
        self.files: dict[int, OpenFile] = {}
        self.leaving: dict[int, threading.Lock] = {}
        """Nodes that are losing a name, with a lock that is held from the look at their handles until the table is changed."""
        self.recent = RecentChanges()
        self.watched: dict[int, WatchedDirectory] = {}
        """Directories that are open, by node."""
        self.copied = CopiedListings()
        self.events: NameEvents | None = None
        """Names that the daemon waits for; None for none."""
        self.allowances = Allowances(_owner_of(nodes.root_directory.fd))
        # For counting alone: threads open files at the same time.
        self._handle_lock = threading.Lock()
        self._next_handle = 1

    # -- handles ------------------------------------------------------------------------------------

    def add_file(self, file: OpenFile) -> int:
        """Give an open file a handle, and return it."""
        handle = self.new_handle()
        self.put_file(handle, file)
        return handle

    def put_file(self, handle: int, file: OpenFile) -> None:
        """Let the handle lead to this open file from now on."""
        self.quota_of(file).add(file.uid)
        self.files[handle] = file
        if file.direct:
            file.node.written_past_cache = True
        self.nodes.open_handle(file.node, handle, writes=file.writes)

    def quota_of(self, file: OpenFile) -> Quota:
        """Return the quota in which the file's handle counts."""
        return self.allowances.descriptors if file.shared is None else self.allowances.sharing

    def inherit_handles(self, last: int) -> None:
        """Give no handle up to ``last`` again: those were a predecessor's."""
        with self._handle_lock:
            self._next_handle = max(self._next_handle, last + 1)

    def new_handle(self) -> int:
        """Return a handle that was never used in this session."""
        with self._handle_lock:
            handle = self._next_handle
            self._next_handle += 1
            return handle

    def file(self, handle: int) -> OpenFile:
        """Return the open file of a handle.

        Raises:
            OSError: EBADF for a handle that is not open.
        """
        file = self.files.get(handle)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return file

    def any_file(self, node: Node, *, writes: bool = False) -> OpenFile | None:
        """Return an open file of the node, of whatever process; hold the object while its descriptor is used."""
        handles = node.handles
        if handles is None or (writes and not node.writers):
            return None
        if not writes:
            # Nearly always the first will do, and a file may be open a hundred thousand times. Another thread
            # may open or close one meanwhile, which ends the iteration with RuntimeError.
            try:
                file = self.files.get(next(iter(handles)))
                if file is not None:
                    return file
            except (StopIteration, RuntimeError):
                pass
        for handle in tuple(handles):
            file = self.files.get(handle)
            if file is not None and (file.writes or not writes):
                return file
        return None

    # -- attributes ---------------------------------------------------------------------------------

    def attr(self, node: Node, file: OpenFile | Descriptor | None = None) -> Attr:
        """Return the attributes of the node now, through a descriptor of its inode or its names.

        Raises:
            OSError: ESTALE when nothing leads to the inode any more.
        """
        if file is None and node.handles is not None:
            file = self.any_file(node)
        if file is not None:
            return self._attr_of(node, partial(os.fstat, file.fd))
        try:
            return self._attr_of(node, self.nodes.path_handle(node).stat)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            last = self.nodes.last_attributes(node)
            if last is not None:
                return Attr(node.id, 0, last, 0)
        try:
            # Another inode may have the name at this moment: pin looks again.
            pinned = self.nodes.pin(node)
        except OSError:
            # A file removed in a predecessor's time, or a pipe that a program has open: the kernel opens
            # pipes without a request.
            orphan = self.hidden.find_orphan(node.ino) if node.parent is None else None
            if orphan is None:
                raise
            pinned = orphan
        return self._attr_of(node, partial(os.fstat, pinned.fd))

    def _attr_of(self, node: Node, read: Callable[[], os.stat_result]) -> Attr:
        st, nlink = self.links(read)
        # While it is replaced two inodes lead to the node.
        if st.st_ino != node.ino and self.nodes.find(st) is not node:
            raise stale()
        node.note_mode(st.st_mode)
        if node is self.nodes.root and nlink > 2:
            # Without the ``..`` of directories that are not shown. A count of 2 or less does not count
            # subdirectories: btrfs directories always have 1.
            nlink -= self._hidden_directories
        return Attr(node.id, 0, self.shown(st), nlink, node.is_written)

    def adopt(
        self, parent: Node, name: bytes, read: Callable[[], os.stat_result], *, count: int
    ) -> tuple[Node, Attr]:
        """Return the node under this name, made if new, with its attributes, which ``read`` reads.

        Raises:
            FileNotFoundError: the name is free.
        """
        node = None
        while node is None:
            # An inode that is replaced meanwhile is looked at again.
            replacements = self.nodes.replacements
            st, nlink = self.links(read)
            node = self.nodes.adopt(parent, name, st, replacements, count=count)
        return node, Attr(node.id, 0, self.shown(st), nlink, node.is_written)

    def adopt_listed(
        self, parent: Node, directory: Descriptor, names: Sequence[bytes], offset: int
    ) -> list[tuple[bytes, Attr | None, int]]:
        """Return names of a listing with their attributes and next offsets; make their nodes, and count a lookup of each.

        Names that are free are left out. A file that cannot be looked at has None and no lookup. The first name lies at ``offset``.
        """
        listed: list[tuple[bytes, Attr | None, int]] = []
        # The kernel lets no name of the directory change meanwhile, but inodes may: in slices, so that nothing read is old.
        for first in range(0, len(names), _LOOKED_AT_ONCE):
            some = names[first : first + _LOOKED_AT_ONCE]
            listed += self._adopt_some(parent, directory, some, offset + first)
        return listed

    def _adopt_some(
        self, parent: Node, directory: Descriptor, names: Sequence[bytes], offset: int
    ) -> list[tuple[bytes, Attr | None, int]]:
        replacements, found = self.nodes.replacements, []
        listed: dict[int, tuple[bytes, Attr | None]] = {}
        for at, name in enumerate(names, offset + 1):
            try:
                st, nlink = self.links(PathHandle(directory, name).stat)
                found.append((at, name, st, self.shown(st), nlink))
            except FileNotFoundError:
                continue
            except OSError:
                # A failing disk, a mount whose server is dead: a plain directory lists the name as well.
                pass
            listed[at] = name, None
        nodes = self.nodes.adopt_all(parent, [(name, st) for _, name, st, *_ in found], replacements)
        if nodes is None:
            # An inode was replaced meanwhile. Again, name by name: the next replacement is likely to be of another one.
            again = (self._adopt_some(parent, directory, [name], at - 1) for at, (name, _) in listed.items())
            return [entry for one in again for entry in one]
        for node, (at, name, _, shown, nlink) in zip(nodes, found, strict=True):
            listed[at] = name, Attr(node.id, 0, shown, nlink, node.is_written)
        return [(name, attr, at) for at, (name, attr) in listed.items()]

    def names_changed(self, directory: Node) -> None:
        """Note that a name of a directory changed, before the request is answered."""
        # Without a lock: the kernel holds that of the directory.
        watched = self.watched.get(directory.id)
        if watched is not None:
            watched.changes += 1
        self.copied.forget(directory.id)
        self.recent.changed(directory)

    # -- hooks --------------------------------------------------------------------------------------

    def shown(self, st: os.stat_result) -> os.stat_result:
        """Return the attributes to be shown for those of a backing file."""
        return st

    def keep_inode(self, node: Node) -> None:
        """Called before attributes of the node change, its content included."""

    def keep_name(
        self, parent: Node, entry: PathHandle, st: os.stat_result | None, *, moved: bool = False
    ) -> None:
        """Called before the binding of a name changes, and with it the attributes of its directory.

        Args:
            parent: directory of the name.
            entry: the name in the backing directory.
            st: attributes of the inode that the name is bound to; None where it is free.
            moved: a directory bound here goes on to exist under another name.
        """

    def mark_attributes(self, node: Node) -> None:
        """Called beside a change of the node's attributes, before it where it may fail in the middle."""

    def with_space(self, change: Callable[[], _T], *, is_vain: Callable[[], bool] | None = None) -> _T:
        """Run a change that may find the file system full."""
        return change()

    def with_space_of(
        self, node: Node, change: Callable[[], _T], *, is_vain: Callable[[], bool] | None = None
    ) -> _T:
        """Run a change of the node's content that may find its file system full."""
        return change()


def is_reserved(nodes: NodeTable, parent: Node, name: bytes) -> bool:
    """Return whether the name is that of the state directory, at the top of the root."""
    return name == STATE_DIR_NAME and parent is nodes.root
