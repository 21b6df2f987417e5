"""Replies of the driver to a process that looks up what it lists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.directories import MIN_LOOKED_UP
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.session import Negotiated

_ROOM = 4096
_ENTRY_BYTES = p.ENTRY_HEAD.size + p.ATTR.size


class Process:
    """A process, and what the kernel remembers for it."""

    def __init__(self, driver: KernelDriver, pid: int) -> None:
        self._driver = driver
        self._pid = pid
        self.lookups: dict[int, int] = {}

    def _request(self, opcode: int) -> p.FuseRequest:
        return p.FuseRequest(opcode, 2, ROOT_ID, 0, 0, self._pid, 0)

    def look_up(self, name: bytes) -> None:
        reply = self._driver._lookup(self._request(p.LOOKUP), memoryview(name + b"\0"))
        self._count(p.ENTRY_HEAD.unpack_from(reply)[0])

    def _count(self, node: int) -> None:
        if node:
            self.lookups[node] = self.lookups.get(node, 0) + 1

    def list(self) -> tuple[list[bytes], bool, bool]:
        """Return the names, whether all had attributes, and whether the kernel's own copy might have been used."""
        handle, flags, _ = p.OPEN_OUT.unpack(self._driver._opendir(self._request(p.OPENDIR), memoryview(b"")))
        # Without it the kernel would drop its copy, which another process may be reading.
        assert flags & p.FOPEN_KEEP_CACHE
        names, attributes, offset = [], set(), 0
        while reply := self._driver._readdirplus(
            self._request(p.READDIRPLUS), memoryview(p.READ_IN.pack(handle, offset, _ROOM, 0, 0, 0, 0))
        ):
            assert len(reply) <= _ROOM
            at = 0
            while at < len(reply):
                node, *_ = p.ENTRY_HEAD.unpack_from(reply, at)
                self._count(node)
                number, offset, length, _ = p.DIRENT.unpack_from(reply, at + _ENTRY_BYTES)
                at += _ENTRY_BYTES + p.DIRENT.size
                name = bytes(reply[at : at + length])
                at += length + -length % 8
                if name not in (b".", b".."):
                    names.append(name)
                    attributes.add(node == number)
        self._driver._releasedir(self._request(p.RELEASEDIR), memoryview(p.RELEASE_IN.pack(handle, 0, 0, 0)))
        assert len(attributes) == 1
        return names, attributes.pop(), bool(flags & p.FOPEN_CACHE_DIR)

    def forget(self) -> None:
        forgotten = b"".join(p.FORGET_ONE.pack(*one) for one in self.lookups.items())
        head = p.BATCH_FORGET_IN.pack(len(self.lookups), 0)
        self._driver._batch_forget(self._request(p.BATCH_FORGET), memoryview(head + forgotten))
        self.lookups.clear()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[KernelDriver]:
    fd = os.open(tmp_path, os.O_PATH)
    null = os.open("/dev/null", os.O_RDWR)
    core = OverlayCore(fd, session="0" * 32)
    try:
        yield KernelDriver(core, null, Negotiated(40, 0))
    finally:
        core.close()
        os.close(null)
        os.close(fd)


def test_a_listing_that_the_kernel_has_kept_is_read_anew_with_attributes(
    driver: KernelDriver, tmp_path: Path
) -> None:
    """A process that looks up what it lists gets attributes with each reply, not the kernel's copy, which has none.

    As many lookups are counted as entries were sent: the nodes are gone when the kernel has forgotten them.
    """
    names = {os.fsencode(f"{'n' * (number % 40)}{number}") for number in range(200)}
    for name in names:
        (tmp_path / os.fsdecode(name)).touch()
    nodes = driver.core._state.nodes
    before = len(nodes)
    finding, other = Process(driver, 100), Process(driver, 200)
    listed, attributes, cached = finding.list()
    assert (sorted(listed), attributes, cached) == (sorted(names), False, True)
    assert len(nodes) == before
    for name in listed[:MIN_LOOKED_UP]:
        finding.look_up(name)
    listed, attributes, cached = finding.list()
    assert (sorted(listed), attributes, cached) == (sorted(names), True, False)
    assert other.list()[1:] == (False, True)
    assert len(nodes) == before + len(names)
    assert {node.lookups for node in nodes._by_id.values() if node.id != ROOT_ID} == {1, 2}
    finding.forget()
    assert len(nodes) == before
