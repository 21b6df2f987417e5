"""Choice of the driver that serves a root, with its reason: the kernel is asked for its features on a connection without a mount.

Guarantees: asking changes nothing that another process can see; a FUSE file system is made by fsopen(2),
answers its first request, and is gone again with its descriptors. A backing file is offered to it as an
anonymous file (O_TMPFILE) of the directory that is to be served. Where the kernel cannot be asked so (before
5.2, filtered system calls), its version decides. pyfuse3 is an extra that not every machine has: it is chosen
only where it can be imported, and the choice says why it is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import os
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from ciuic.errors import pip_install
from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.kernel import session as kernel_session
from ciuic.system import privileges
from ciuic.system.poll import readable

WITHOUT_PASSTHROUGH: Final = "CIUIC_WITHOUT_PASSTHROUGH"
"""Environment variable with which the kernel is treated as one that lacks passthrough (before 6.9)."""
# The same numbers on every architecture.
_FSOPEN, _FSCONFIG = 430, 431
_FSOPEN_CLOEXEC, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 1, 6
INSTALL_PYFUSE3: Final = f"{pip_install('ciuic[pyfuse3]')} (needs libfuse3-dev, pkg-config, gcc)"
_PASSTHROUGH_KERNEL: Final = (6, 9)
_LOSES_FILES: Final = "files that programs have open are lost if the worker is killed"
"""Consequence of a session that no successor can go on with."""
_INIT_SECONDS: Final = 5.0
_MAX_STACK_DEPTH: Final = 2
"""FILESYSTEM_MAX_STACK_DEPTH of the kernel: a root on an overlayfs can be served, and nothing can be stacked
upon it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class KernelOffer(NamedTuple):
    """Features that the kernel offers to a session of our own over one directory."""

    protocol: str
    """Version of the protocol such as ``7.45``; empty where the kernel could not be asked."""
    passthrough: bool
    resends: bool
    """True if the kernel sends unanswered requests to a successor again."""
    stack_depth: int
    """Depth of stacked file systems to ask for at INIT."""
    reason: str
    """Reason for no passthrough; empty where there is passthrough."""


class DriverChoice(NamedTuple):
    """The driver that serves a root."""

    driver: str
    """``kernel`` or ``pyfuse3``."""
    offer: KernelOffer
    why: str
    """Reason for the choice, in words."""


def choose(wanted: str, offer: KernelOffer, lacking: Callable[[], str] | None = None) -> DriverChoice:
    """Choose the driver.

    Without pyfuse3 our own session serves whatever the kernel offers, also where the configuration names
    pyfuse3: a root that is served by the other driver is better off than one that is not served.

    Args:
        wanted: the setting: auto, kernel or pyfuse3.
        offer: features of the kernel (`ask_kernel`).
        lacking: returns why pyfuse3 cannot be used, empty where it can (`_pyfuse3_lacking`). Called only where
            it would be chosen.
    """
    choice = _chosen(wanted, offer, lacking)
    if choice.driver == "kernel" and offer.resends:
        return choice
    return choice._replace(why=f"{choice.why}; {_LOSES_FILES}")


def _chosen(wanted: str, offer: KernelOffer, lacking: Callable[[], str] | None) -> DriverChoice:
    # Our own session pays where the kernel has passthrough or keeps requests for a successor (both Linux
    # 6.9).
    if wanted == "kernel" or (wanted == "auto" and (offer.passthrough or offer.resends)):
        return DriverChoice("kernel", offer, _why_kernel(offer))
    missing = (lacking or _pyfuse3_lacking)()
    if wanted == "pyfuse3":
        if missing:
            return DriverChoice(
                "kernel", offer, f"the configuration asks for pyfuse3, and {missing}; {_why_kernel(offer)}"
            )
        return DriverChoice(
            "pyfuse3", offer, "the configuration asks for it; passthrough needs the kernel driver"
        )
    # Without passthrough and without a successor the portable driver serves as well, if it is installed.
    if missing:
        return DriverChoice("kernel", offer, f"{_why_kernel(offer)}; and {missing}")
    return DriverChoice("pyfuse3", offer, f"a session of our own would gain nothing: {offer.reason}")


def _why_kernel(offer: KernelOffer) -> str:
    if offer.passthrough:
        return "the kernel carries data to the files by itself (passthrough)"
    return f"no passthrough: {offer.reason}"


def _pyfuse3_lacking() -> str:
    """Return why pyfuse3 cannot be used, in words; empty where it can.

    Imports it, so that a missing libfuse is found as well.
    """
    try:
        importlib.import_module("pyfuse3")
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: {INSTALL_PYFUSE3}"
    except ImportError as error:
        # It was built against a libfuse that this machine lacks.
        return f"pyfuse3 cannot be loaded ({error}): {INSTALL_PYFUSE3}"
    return ""


def ask_kernel(directory: int | None, *, release: str | None = None) -> KernelOffer:
    """Return the kernel's offer for files in ``directory`` (a descriptor, O_PATH suffices); without one, for files as such."""
    offer = _kernel_offer(directory, os.uname().release if release is None else release)
    if os.environ.get(WITHOUT_PASSTHROUGH):
        return offer._replace(passthrough=False, reason=f"{WITHOUT_PASSTHROUGH} is set")
    return offer


def _kernel_offer(directory: int | None, release: str) -> KernelOffer:
    offer = KernelOffer("", False, False, 1, "")
    # ELOOP at the first depth: the directory lies on a stacked file system such as an overlayfs. The greater
    # depth is not asked for elsewhere: with it nothing can be stacked on the mount in turn.
    for depth in range(1, _MAX_STACK_DEPTH + 1):
        try:
            offer, error_number = _asked(directory, depth)
        except (OSError, TimeoutError, kernel_session.UnsupportedProtocol) as error:
            return _by_version(release, str(error))
        if error_number != errno.ELOOP:
            break
    if not offer.passthrough and not offer.reason:
        return offer._replace(reason=f"Linux {release} does not offer it (6.9 does)")
    return offer


def _by_version(release: str, error: str) -> KernelOffer:
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _PASSTHROUGH_KERNEL:
        return KernelOffer("", False, False, 1, f"Linux {release} has none (6.9 has)")
    # The kernel refuses at the session's first request what it lacks, and the session goes without it.
    if privileges.Capability.SYS_ADMIN in privileges.permitted():
        return KernelOffer("", True, True, 1, "")
    return KernelOffer(
        "", False, True, 1, f"it needs CAP_SYS_ADMIN, and the kernel could not be asked: {error}"
    )


def _asked(directory: int | None, depth: int) -> tuple[KernelOffer, int]:
    """Return the offer, and the errno with which a backing file was refused (0: it was not, or none was offered)."""
    fuse_fd = os.open("/dev/fuse", os.O_RDWR)
    context = -1
    try:
        context = _connected(fuse_fd)
        if not readable(fuse_fd, _INIT_SECONDS):
            raise TimeoutError("the kernel sends no first request")
        agreed = kernel_session.negotiate(fuse_fd, passthrough=True, stack_depth=depth)
        error_number = _refusal(fuse_fd, directory) if agreed.passthrough and directory is not None else 0
    finally:
        # Before the context: the end of the file system sends a request, which the kernel does not wait for
        # without a server.
        os.close(fuse_fd)
        if context >= 0:
            os.close(context)
    offer = KernelOffer(
        f"{p.KERNEL_VERSION}.{agreed.minor}",
        agreed.passthrough and not error_number,
        agreed.resends,
        depth,
        _in_words(error_number) if error_number else "",
    )
    return offer, error_number


def _connected(fuse_fd: int) -> int:
    """Make a FUSE file system on ``fuse_fd``, mounted nowhere; return the descriptor whose end is its end."""
    context = _syscall(_FSOPEN, b"fuse", _FSOPEN_CLOEXEC)
    try:
        options = {
            b"source": b"ciuic-asks",
            b"fd": b"%d" % fuse_fd,
            b"rootmode": b"40000",
            b"user_id": b"%d" % os.getuid(),
            b"group_id": b"%d" % os.getgid(),
        }
        for key, value in options.items():
            _syscall(_FSCONFIG, context, _FSCONFIG_SET_STRING, key, value, 0)
        _syscall(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
    except BaseException:
        os.close(context)
        raise
    return context


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _refusal(fuse_fd: int, directory: int) -> int:
    """Return the errno with which the kernel refuses a backing file of this directory; 0 when it takes it, or none can be made."""
    try:
        fd = os.open(b"/proc/self/fd/%d" % directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        # Read-only, full, or of a kind without O_TMPFILE. The session learns at its first open.
        return 0
    try:
        argument = bytearray(p.BACKING_MAP.pack(fd, 0, 0))
        backing_id = fcntl.ioctl(fuse_fd, p.DEV_IOC_BACKING_OPEN, argument, True)
        # It ends with the connection in any case.
        with contextlib.suppress(OSError):
            fcntl.ioctl(fuse_fd, p.DEV_IOC_BACKING_CLOSE, bytearray(p.BACKING_ID.pack(backing_id)))
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        os.close(fd)
    return 0


def _in_words(error_number: int) -> str:
    if error_number == errno.EPERM:
        return "it needs CAP_SYS_ADMIN"
    if error_number == errno.ELOOP:
        return "too many file systems are stacked below the directory"
    return f"the kernel refuses files of this file system: {os.strerror(error_number)}"
