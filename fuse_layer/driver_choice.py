"""Which driver serves a root, and why: what the kernel offers is asked of the kernel, on a connection mounted nowhere.

Guarantees: asking changes nothing that anybody else can see; a file system of FUSE's kind is made by fsopen(2), answers
its first request, and is gone again with its descriptors. A backing file is offered to it as an anonymous file
(O_TMPFILE) of the directory that is to be served. Where the kernel cannot be asked so (before 5.2, filtered system
calls), its version decides. pyfuse3 is an extra that not every machine has: it is chosen only where it can be imported, and the
choice says why it is not.
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

from ciuic import privileges
from ciuic.fuse_layer import kernel_negotiation
from ciuic.fuse_layer import kernel_protocol as p
from ciuic.readiness import readable

WITHOUT_PASSTHROUGH: Final = "CIUIC_WITHOUT_PASSTHROUGH"
"""An environment variable: where it is set, the kernel is taken for one that lacks passthrough (before 6.9)."""
_FSOPEN, _FSCONFIG = 430, 431  # the same on every architecture
_FSOPEN_CLOEXEC, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 1, 6
INSTALL_PYFUSE3: Final = "pip install 'ciuic[pyfuse3]' (needs libfuse3-dev, pkg-config, gcc)"
_PASSTHROUGH_KERNEL: Final = (6, 9)
_INIT_SECONDS: Final = 5.0
_DEEPEST: Final = 2
"""Of stacked file systems (FILESYSTEM_MAX_STACK_DEPTH): what lies on an overlayfs can be served, and not stacked upon."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Offer(NamedTuple):
    """What the kernel has for a session of our own over one directory."""

    protocol: str
    """``7.45``; empty where the kernel could not be asked."""
    passthrough: bool
    resends: bool
    stack_depth: int
    """To be asked for at INIT."""
    reason: str
    """Why there is no passthrough; empty where there is."""


class Choice(NamedTuple):
    """Who serves."""

    driver: str
    """``kernel`` or ``pyfuse3``."""
    offer: Offer
    why: str


def choose(wanted: str, offer: Offer, lacking: Callable[[], str] | None = None) -> Choice:
    """For the setting ``wanted`` (auto, kernel, pyfuse3).

    ``lacking``: why pyfuse3 cannot be used, empty where it can (`pyfuse3_lacking`); asked only where it would be chosen. Without it the
    kernel session serves whatever the kernel offers, also where the configuration names pyfuse3: a root that is served by the
    other driver is better off than one that is not served.
    """
    if wanted == "kernel" or (wanted == "auto" and (offer.passthrough or offer.resends)):
        return Choice("kernel", offer, _why_kernel(offer))
    missing = (lacking or pyfuse3_lacking)()
    if wanted == "pyfuse3":
        if missing:
            return Choice(
                "kernel", offer, f"the configuration asks for pyfuse3, and {missing}; {_why_kernel(offer)}"
            )
        return Choice("pyfuse3", offer, "the configuration asks for it; passthrough needs the kernel driver")
    if missing:
        return Choice("kernel", offer, f"{_why_kernel(offer)}; and {missing}")
    return Choice("pyfuse3", offer, f"a session of our own would gain nothing: {offer.reason}")


def _why_kernel(offer: Offer) -> str:
    if offer.passthrough:
        return "the kernel carries data to the files by itself (passthrough)"
    return f"no passthrough: {offer.reason}"


def pyfuse3_lacking() -> str:
    """Why pyfuse3 cannot be used, in words; empty where it can. Imports it, so that a missing libfuse is found as well."""
    try:
        importlib.import_module("pyfuse3")
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: {INSTALL_PYFUSE3}"
    except ImportError as error:  # built against a libfuse that is not here
        return f"pyfuse3 cannot be loaded ({error}): {INSTALL_PYFUSE3}"
    return ""


def ask_kernel(directory: int | None, *, release: str | None = None) -> Offer:
    """What the kernel offers for files in ``directory`` (a descriptor, O_PATH suffices); without one, for files as such."""
    offer = _offer(directory, os.uname().release if release is None else release)
    if os.environ.get(WITHOUT_PASSTHROUGH):
        return offer._replace(passthrough=False, reason=f"{WITHOUT_PASSTHROUGH} is set")
    return offer


def _offer(directory: int | None, release: str) -> Offer:
    offer = Offer("", False, False, 1, "")
    for depth in range(1, _DEEPEST + 1):
        try:
            offer, error_number = _asked(directory, depth)
        except (OSError, TimeoutError, kernel_negotiation.NotSpoken) as error:
            return _by_version(release, str(error))
        if error_number != errno.ELOOP:
            break
    if not offer.passthrough and not offer.reason:
        return offer._replace(reason=f"Linux {release} does not offer it (6.9 does)")
    return offer


def _by_version(release: str, error: str) -> Offer:
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _PASSTHROUGH_KERNEL:
        return Offer("", False, False, 1, f"Linux {release} has none (6.9 has)")
    # The session finds out when it begins, and goes without what it is refused.
    if privileges.Capability.SYS_ADMIN in privileges.permitted():
        return Offer("", True, True, 1, "")
    return Offer("", False, True, 1, f"it needs CAP_SYS_ADMIN, and the kernel could not be asked: {error}")


def _asked(directory: int | None, depth: int) -> tuple[Offer, int]:
    """The offer, and the errno with which a backing file was refused (0: it was not, or none was offered)."""
    fuse_fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    context = -1
    try:
        context = _connected(fuse_fd)
        if not readable(fuse_fd, _INIT_SECONDS):
            raise TimeoutError("the kernel sends no first request")
        agreed = kernel_negotiation.negotiate(fuse_fd, passthrough=True, stack_depth=depth)
        error_number = _refusal(fuse_fd, directory) if agreed.passthrough and directory is not None else 0
    finally:
        os.close(
            fuse_fd
        )  # first: what the end of the other would send is then answered by nobody, and not waited for
        if context >= 0:
            os.close(context)
    offer = Offer(
        f"{p.KERNEL_VERSION}.{agreed.minor}",
        agreed.passthrough and not error_number,
        agreed.resends,
        depth,
        _in_words(error_number) if error_number else "",
    )
    return offer, error_number


def _connected(fuse_fd: int) -> int:
    """A FUSE file system on ``fuse_fd``, mounted nowhere: the descriptor that it lives by."""
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
    """The errno with which the kernel refuses a backing file of this directory; 0 when it takes it, or none can be made."""
    try:
        fd = os.open(b"/proc/self/fd/%d" % directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # read-only, full, or of a kind without O_TMPFILE: the first open will show
        return 0
    try:
        argument = bytearray(p.BACKING_MAP.pack(fd, 0, 0))
        backing_id = fcntl.ioctl(fuse_fd, p.DEV_IOC_BACKING_OPEN, argument, True)
        with contextlib.suppress(OSError):  # it goes with the connection
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
