"""Tests of opens that are carried out and not answered: the kernel is told an error, or a successor gets them again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, cast

import pytest

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.directories import Directories
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.core.overlay_hooks import OverlayFiles
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.journal import journal_writer
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.kernel.driver import KernelDriver, OpenModes, OpenPlan
from ciuic.fuse_layer.kernel.session import Negotiated

_LABEL = p.SECCTX.pack(5, 0) + b"security.test\0" + b"label"
_EXTENSION = p.SECCTX_HEADER.pack(p.SECCTX_HEADER.size + len(_LABEL), 1) + _LABEL
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL
REQUESTS = {
    "create": (p.CREATE, p.CREATE_IN.pack(_FLAGS, 0o100600, 0, 0) + b"new\0"),
    "tmpfile": (p.TMPFILE, p.CREATE_IN.pack(os.O_RDWR, 0o100600, 0, 0) + b"\0"),
    "mkdir": (p.MKDIR, p.MKDIR_IN.pack(0o40755, 0) + b"new\0"),
    "mknod": (p.MKNOD, p.MKNOD_IN.pack(0o10644, 0, 0, 0) + b"new\0"),
    "symlink": (p.SYMLINK, b"new\0target\0"),
}
OPENS = {"create", "tmpfile"}


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[KernelDriver]:
    (tmp_path / "root").mkdir()
    backing, fuse = os.open(tmp_path / "root", os.O_PATH), os.open("/dev/null", os.O_RDWR)
    core = OverlayCore(backing, session="s")
    yield KernelDriver(core, fuse, Negotiated(45, 0))
    core.close()
    os.close(backing)
    os.close(fuse)


def _fail(*_arguments: object, **_more: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _label(driver: KernelDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver.core.attributes, "setxattr", _fail)


def _passing_by(driver: KernelDriver, patch: pytest.MonkeyPatch) -> None:
    unseen = OpenPlan(p.FOPEN_PASSTHROUGH, unseen=True)
    patch.setattr(OpenModes, "plan", lambda *_, **__: unseen)
    patch.setattr(driver.core.files, "is_unseen", _fail)


def _backing(driver: KernelDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenModes, "commit", _fail)


STEPS = {"label": _label, "passing by": _passing_by, "backing": _backing}


@pytest.mark.parametrize(
    ("kind", "step"),
    [(kind, step) for kind in REQUESTS for step in STEPS if kind in OPENS or step == "label"],
)
def test_what_the_kernel_is_not_told_of_is_let_go(
    kind: str, step: str, driver: KernelDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a creation that is answered with an error no handle, descriptor or node is left."""
    opcode, body = REQUESTS[kind]
    request = FuseRequest(opcode, 2, ROOT_ID, 0, 0, 1, len(_EXTENSION))
    STEPS[step](driver, monkeypatch)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        driver._handlers()[opcode](request, memoryview(body + _EXTENSION))
    assert driver.core.open_files == 0
    assert not driver.handle_journal.files
    assert not driver.modes._families
    assert len(driver.core._state.nodes) == 1
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    assert f"{tmp_path}/root/new" not in targets


UNIQUE = 2
TERMS = Negotiated(45, 0)


class Life:
    """Driver of a worker on ``root``, without a kernel; a second one continues with its journal."""

    def __init__(self, root: Path, base: Path) -> None:
        inherited = journal_writer.replay(base)
        self._backing = os.open(root, os.O_PATH)
        self._fuse = os.open("/dev/null", os.O_RDWR)
        kept = self.journal = JournalWriter(base)
        if inherited is None:
            kept.begin(TERMS.minor, TERMS.flags, TERMS.max_write_bytes)
        self.core = OverlayCore(self._backing, session="s", journal=kept, inherited=inherited)
        self.driver = KernelDriver(self.core, self._fuse, TERMS, journal=kept, inherited=inherited)

    def ask(self, opcode: int, node: int, body: bytes, *, resent: bool) -> bytes:
        unique = UNIQUE | (p.UNIQUE_RESEND if resent else 0)
        request = FuseRequest(opcode, unique, node, 0, 0, 1, 0)
        return cast(bytes, self.driver._handlers()[opcode](request, memoryview(body)))

    def handle(self, reply: bytes) -> int:
        """Return the handle at the end of an open's answer."""
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        return int(handle)

    def end(self) -> None:
        self.core.close()
        self.journal.remove()
        os.close(self._backing)
        os.close(self._fuse)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "folder").mkdir()
    (tmp_path / "root" / "file").write_bytes(b"content")
    return tmp_path / "root"


@pytest.fixture
def predecessor(root: Path, tmp_path: Path) -> Iterator[Life]:
    life = Life(root, tmp_path / "ledger")
    yield life
    life.end()


def request_of(kind: str, life: Life) -> tuple[int, int, bytes]:
    """Return the request of each kind: opcode, node and body."""
    if kind == "open":
        return (
            p.OPEN,
            life.core.names.lookup(ROOT_ID, b"file").node,
            p.OPEN_IN.pack(os.O_RDWR | os.O_TRUNC, 0),
        )
    if kind == "opendir":
        return p.OPENDIR, life.core.names.lookup(ROOT_ID, b"folder").node, p.OPEN_IN.pack(0, 0)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    return p.CREATE, ROOT_ID, p.CREATE_IN.pack(flags, 0o100400, 0, 0) + b"new\0"


KINDS = ["open", "create", "opendir"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", [False, True], ids=["taken over", "lost"])
def test_an_open_that_comes_again(
    kind: str, lost: bool, root: Path, tmp_path: Path, predecessor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open sent again gets the predecessor's handle if it was taken over, and otherwise a new one.

    The file is not truncated twice, and no second handle stays open.
    """
    opcode, node, body = request_of(kind, predecessor)
    first = predecessor.handle(predecessor.ask(opcode, node, body, resent=False))
    if kind != "opendir":
        # The file was changed through another handle.
        predecessor.core.files.write(first, 0, b"since")
    with monkeypatch.context() as at_the_limit:
        if lost:

            def refused(*_arguments: object, **_more: object) -> None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            at_the_limit.setattr(OverlayFiles, "inherit", refused)
            at_the_limit.setattr(Directories, "inherit", refused)
        successor = Life(root, tmp_path / "ledger")
    try:
        handle = successor.handle(successor.ask(opcode, node, body, resent=True))
        assert (handle == first) is not lost
        if kind == "opendir":
            assert list(successor.core.directories.readdir(handle, 0)) == []
            assert set(successor.driver.handle_journal.directories) == {handle}
            return
        assert successor.core.files.read(handle, 0, 100) == b"since"
        assert successor.core.files.write(handle, 0, b"SINCE") == 5
        assert set(successor.driver.handle_journal.files) == {handle}
        assert successor.core.open_files == 1
        node = successor.driver.handle_journal.files[handle].node
        successor.ask(p.RELEASE, node, p.RELEASE_IN.pack(handle, 0, 0, 0), resent=False)
        assert not successor.driver.modes._families
    finally:
        successor.end()
