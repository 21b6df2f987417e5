"""Tests of files and names that were made, and of which the kernel is told an error all the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.fuse_protocol import FuseRequest
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
