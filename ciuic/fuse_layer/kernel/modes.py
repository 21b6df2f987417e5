"""Path of an open file's data: from kernel to backing file, through this process, or through the kernel's page cache.

The kernel lets opens of one inode coexist only within one *family* (fs/fuse/iomode.c): either all of them are
backed by the same backing file (passthrough), or none is. The first open decides, until the last one is
closed. docs/decisions/families-of-opens.md has the table of combinations that the kernel refuses.

* **passthrough** (FOPEN_PASSTHROUGH): reads, writes and mappings go to the backing file and its page cache
  without us. For readers, and for writers of new content: created or emptied by this open, write-only, not
  appending. Every checkpoint is one. Changes of such a writer are *unseen*: the file counts as wholly dirty
  for as long as it is open.
* **tracked** (with FOPEN_DIRECT_IO as well): read and write come to us, mappings go to the backing file. For
  write-only opens of existing content, which cannot be mapped: logs, updates in place. Every change is seen.
* **cached** (neither): all data come to us by way of the kernel's cache, written through; stores through a
  mapping come when the kernel writes them back, at the latest at a flush. For read-write opens, which may be
  mapped, so that databases are exact at a cut. Where the file is in the passthrough family already, a
  read-write open has to join it: tracked, but unseen because of the mappings that it may have, which outlive
  its close.

Rules (open_rules.py) take single files out of this: logs that are made and kept open are tracked from their
first open on, and databases are cached although a reader opens them first.

Without passthrough everything is cached. Backing ids: one for each inode of the passthrough family, from the
first open to the last release.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

import structlog

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.journal.records import OpenedFile
from ciuic.fuse_layer.state.open_rules import OpenPreference

log = structlog.get_logger(__name__)

_LOCK_STRIPES: Final = 64


class OpenPlan(NamedTuple):
    """Flags with which an open is to be answered."""

    open_flags: int
    unseen: bool
    """True if writes may reach the backing file past the worker."""

    @property
    def passthrough(self) -> bool:
        """True if the open belongs to the passthrough family."""
        return bool(self.open_flags & p.FOPEN_PASSTHROUGH)


class _Family:
    __slots__ = ("backing_id", "opens")

    def __init__(self, backing_id: int | None) -> None:
        self.backing_id = backing_id
        """Backing id of the passthrough family; None for the cached family."""
        self.opens = 0


class OpenModes:
    """The open inodes of one connection and their families.

    Thread-safe; ``lock`` is held from plan to commit.
    """

    def __init__(self, fuse_fd: int, *, passthrough: bool) -> None:
        self._fd = fuse_fd
        self.passthrough = passthrough
        self._families: dict[int, _Family] = {}
        # Held from plan to commit: two first opens of one inode must not decide for different families.
        self._locks = tuple(threading.Lock() for _ in range(_LOCK_STRIPES))

    def inherit(self, files: Iterable[OpenedFile]) -> None:
        """Take over the families and backing ids of a predecessor's open files, which the kernel still has."""
        for opened in files:
            family = self._families.setdefault(opened.node, _Family(opened.backing_id or None))
            family.opens += 1

    def lock(self, node_id: int) -> threading.Lock:
        """Return the lock of a node, to be held from ``plan`` to ``commit``."""
        return self._locks[node_id % _LOCK_STRIPES]

    def plan(
        self, node_id: int, flags: int, *, fresh: bool, preference: OpenPreference = OpenPreference.ANY
    ) -> OpenPlan:
        """Choose the flags of an open.

        Args:
            node_id: node that is opened.
            flags: flags of the program's open(2).
            fresh: the file is empty, made or emptied by this open.
            preference: choice of the rules (open_rules.py), followed where the family allows it.
        """
        family = self._families.get(node_id)
        # Opens that exist decide, also when passthrough was refused meanwhile for another file.
        if (family is None and not self.passthrough) or (family is not None and family.backing_id is None):
            # All data of this family pass through the kernel's cache, so what is cached stays true.
            return OpenPlan(p.FOPEN_KEEP_CACHE, unseen=False)
        if family is None and preference is OpenPreference.CACHED:
            # Without FOPEN_KEEP_CACHE, as below.
            return OpenPlan(0, unseen=False)
        access = flags & os.O_ACCMODE
        if access == os.O_RDONLY:
            return OpenPlan(p.FOPEN_PASSTHROUGH, unseen=False)
        if access == os.O_WRONLY:
            if fresh and not flags & os.O_APPEND and preference is not OpenPreference.TRACKED:
                return OpenPlan(p.FOPEN_PASSTHROUGH, unseen=True)
            return OpenPlan(p.FOPEN_PASSTHROUGH | p.FOPEN_DIRECT_IO, unseen=False)
        if family is not None:
            return OpenPlan(p.FOPEN_PASSTHROUGH | p.FOPEN_DIRECT_IO, unseen=True)
        # Not FOPEN_KEEP_CACHE: pages cached before may be older than data that was written by passthrough
        # since.
        return OpenPlan(0, unseen=False)

    def appending(self, plan: OpenPlan) -> OpenPlan:
        """Return the plan of an open that writes an append-only inode.

        Raises:
            OSError: EPERM where the program could map the backing file, past the flag: the kernel looks for
                it at its own inode.
        """
        if plan.passthrough:
            if plan.unseen:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return plan
        # The write cache sends whole pages, also what they had before.
        return OpenPlan(p.FOPEN_DIRECT_IO, unseen=False)

    def commit(self, node_id: int, plan: OpenPlan, fd: int) -> tuple[OpenPlan, int]:
        """Count the open; return its plan and its backing id (0 for none).

        The plan becomes a cached one when the kernel refuses the backing file; never when the family is
        decided already.
        """
        family = self._families.get(node_id)
        if family is None:
            backing_id = self._backing_open(fd) if plan.passthrough else None
            if plan.passthrough and backing_id is None:
                plan = OpenPlan(0, unseen=False)
            family = self._families[node_id] = _Family(backing_id)
        family.opens += 1
        return plan, family.backing_id or 0

    def released(self, node_id: int) -> None:
        """Note that an open which was committed is over."""
        # An open between plan and commit relies on the family: it must not end in between.
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
        """Return whether the kernel holds the inode's backing file, so that the node must not be given another inode."""
        family = self._families.get(node_id)
        return family is not None and family.backing_id is not None

    def _backing_open(self, fd: int) -> int | None:
        try:
            return self._ioctl(p.DEV_IOC_BACKING_OPEN, bytearray(p.BACKING_MAP.pack(fd, 0, 0)))
        except OSError as error:
            # These errors hold for every file of the root.
            if error.errno in (errno.EPERM, errno.ELOOP, errno.ENOTTY):
                log.warning("passthrough_refused", error=str(error))
                self.passthrough = False
            return None

    def _ioctl(self, request: int, argument: bytearray) -> int:
        # Python returns the call's result, which is the id, only when the buffer may be written to.
        result = fcntl.ioctl(self._fd, request, argument, True)
        assert isinstance(result, int)
        return result
