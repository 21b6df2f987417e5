"""Which way the data of an open file take: kernel to kernel, through this process, or through the kernel's page cache.

The kernel lets opens of one inode coexist only within one *family* (fs/fuse/iomode.c): either all of them are backed by
the same backing file (passthrough), or none is. The first open decides, until the last one is closed.

* **passthrough** (FOPEN_PASSTHROUGH): reads, writes and mappings go to the backing file and its page cache without us.
  For readers, and for writers of what is new: created or emptied by this open, write-only, not appending. Every
  checkpoint is one. What such a writer changes is *unseen*: the file counts as wholly dirty for as long as it is open.
* **tracked** (with FOPEN_DIRECT_IO as well): read and write come to us, mappings go to the backing file. For write-only
  opens of what exists, which cannot be mapped: logs, updates in place. Every change is seen.
* **cached** (neither): everything comes to us by way of the kernel's cache, written through; what is written through a
  mapping comes when the kernel writes it back, at the latest at a flush. For read-write opens, which may be mapped, so
  that databases are exact at a cut. Where the file is in the passthrough family already, a read-write open has to join
  it: tracked, but unseen because of the mappings that it may have, which outlive its close.

Rules (open_rules.py) take single files out of this: logs that are made and kept open are tracked from their first open on, and
databases are cached although a reader opens them first.

Without passthrough everything is cached. Backing ids: one for each inode of the passthrough family, from the first open
to the last release.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

import structlog

from ciuic.fuse_layer import kernel_protocol as p
from ciuic.fuse_layer.ledger import Opened
from ciuic.fuse_layer.open_rules import Wish

log = structlog.get_logger(__name__)

_LOCK_STRIPES: Final = 64


class Plan(NamedTuple):
    """What an open is going to be."""

    open_flags: int
    unseen: bool
    """Writes may reach the backing file past us."""

    @property
    def passthrough(self) -> bool:
        return bool(self.open_flags & p.FOPEN_PASSTHROUGH)


class _Family:
    __slots__ = ("backing_id", "opens")

    def __init__(self, backing_id: int | None) -> None:
        self.backing_id = backing_id
        """None: the cached family."""
        self.opens = 0


class Modes:
    """The open inodes of one connection and their families. Thread-safe; ``lock`` is held from plan to commit."""

    def __init__(self, fuse_fd: int, *, passthrough: bool) -> None:
        self._fd = fuse_fd
        self.passthrough = passthrough
        self._families: dict[int, _Family] = {}
        self._locks = tuple(threading.Lock() for _ in range(_LOCK_STRIPES))

    def inherit(self, files: Iterable[Opened]) -> None:
        """The families and backing ids of what a predecessor had open; the kernel still has them."""
        for opened in files:
            family = self._families.setdefault(opened.node, _Family(opened.backing_id or None))
            family.opens += 1

    def lock(self, node_id: int) -> threading.Lock:
        return self._locks[node_id % _LOCK_STRIPES]

    def plan(self, node_id: int, flags: int, *, fresh: bool, wish: Wish = Wish.ANY) -> Plan:
        """For an open with ``flags``; ``fresh``: what it can see is empty, made or emptied by this open. ``wish``: what the rules
        say of the file (open_rules.py), followed where the family allows it."""
        family = self._families.get(node_id)
        # What is open already decides, also when passthrough was refused meanwhile for another file.
        if (family is None and not self.passthrough) or (family is not None and family.backing_id is None):
            return Plan(p.FOPEN_KEEP_CACHE, unseen=False)
        if family is None and wish is Wish.CACHED:
            return Plan(0, unseen=False)  # without FOPEN_KEEP_CACHE, as below
        access = flags & os.O_ACCMODE
        if access == os.O_RDONLY:
            return Plan(p.FOPEN_PASSTHROUGH, unseen=False)
        if access == os.O_WRONLY:
            if fresh and not flags & os.O_APPEND and wish is not Wish.TRACKED:
                return Plan(p.FOPEN_PASSTHROUGH, unseen=True)
            return Plan(p.FOPEN_PASSTHROUGH | p.FOPEN_DIRECT_IO, unseen=False)
        if family is not None:
            return Plan(p.FOPEN_PASSTHROUGH | p.FOPEN_DIRECT_IO, unseen=True)
        # Pages of an earlier time in this family may be older than what passed by since: not FOPEN_KEEP_CACHE.
        return Plan(0, unseen=False)

    def commit(self, node_id: int, plan: Plan, fd: int) -> tuple[Plan, int]:
        """Count the open and get it its backing id (0 for none). The plan becomes a cached one when the kernel takes no
        backing file of this kind; never when the family is decided already."""
        family = self._families.get(node_id)
        if family is None:
            backing_id = self._backing_open(fd) if plan.passthrough else None
            if plan.passthrough and backing_id is None:
                plan = Plan(0, unseen=False)
            family = self._families[node_id] = _Family(backing_id)
        family.opens += 1
        return plan, family.backing_id or 0

    def released(self, node_id: int) -> None:
        """An open that was committed is over."""
        with self.lock(node_id):
            family = self._families.get(node_id)
            if family is None:
                return
            family.opens -= 1
            if family.opens:
                return
            del self._families[node_id]
            if family.backing_id is not None:
                self._ioctl(p.DEV_IOC_BACKING_CLOSE, bytearray(p.BACKING_ID.pack(family.backing_id)))

    def is_passthrough(self, node_id: int) -> bool:
        """Whether the kernel holds the inode's backing file: it must not be given another."""
        family = self._families.get(node_id)
        return family is not None and family.backing_id is not None

    def _backing_open(self, fd: int) -> int | None:
        try:
            return self._ioctl(p.DEV_IOC_BACKING_OPEN, bytearray(p.BACKING_MAP.pack(fd, 0, 0)))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ELOOP, errno.ENOTTY):  # none of them will ever be
                log.warning("passthrough_refused", error=str(error))
                self.passthrough = False
            return None

    def _ioctl(self, request: int, argument: bytearray) -> int:
        # The id comes back as the call's result only when the buffer may be written to.
        result = fcntl.ioctl(self._fd, request, argument, True)
        assert isinstance(result, int)
        return result
