"""Doctor's checks of the machine: kernel, FUSE, driver, I/O schedulers, pressure figures, clock, systemd.

Guarantees: nothing is changed; a file that is not there is a fact and not a failure. Where a check reads /proc, /sys or
/dev, that directory is an argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ciuic.cli.doctor.inquiry import Finding, Inquiry, NoAnswer, not_looked_at, ok, problem, warning
from ciuic.system import service_manager
from ciuic.system.mountinfo import Mount

if TYPE_CHECKING:
    from ciuic.cli.shared.systemd import Systemd
    from ciuic.fuse_layer.driver_choice import KernelOffer

_OLDEST_KERNEL: Final = (5, 4)
# FUSE passthrough (docs/decisions/own-session.md).
_PASSTHROUGH_KERNEL: Final = (6, 9)
# Bit number in the masks of /proc/PID/status (capabilities(7)).
_CAP_SYS_ADMIN: Final = 21
# adjtimex(2): the clock is not synchronized.
_TIME_ERROR: Final = 5
# More than sizeof(struct timex) on every architecture (208 on x86-64).
_TIMEX_BYTES: Final = 512
# Under the others, such as none and kyber, no request waits for one of a better class
# (docs/decisions/weights.md).
HONOURS_IDLE: Final = frozenset({"bfq", "cfq", "mq-deadline"})


def kernel(release: str) -> Iterator[Finding]:
    """The kernel's version against what the overlay needs."""
    version = kernel_version(release)
    if version < _OLDEST_KERNEL:
        needed = ".".join(map(str, _OLDEST_KERNEL))
        yield warning(
            "kernel", f"Linux {release} is older than what ciuic is tested with", f"{needed} or later"
        )
    else:
        yield ok("kernel", f"Linux {release}")


def kernel_version(release: str) -> tuple[int, int]:
    """(major, minor) of a release such as ``6.8.0-45-generic``; (0, 0) if it has no such form."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def fuse(device: Path = Path("/dev/fuse"), proc_self: Path = Path("/proc/self")) -> Iterator[Finding]:
    """/dev/fuse, and the right to mount."""
    try:
        mode = os.stat(device).st_mode
    except OSError as error:
        yield problem(
            "fuse",
            f"{device}: {error.strerror}",
            "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN",
        )
        return
    if not stat.S_ISCHR(mode):
        yield problem("fuse", f"{device} is not a device", "mknod /dev/fuse c 10 229")
        return
    try:
        # Opened, and not looked at with access(2): a container's device rules refuse at open, root included.
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        yield problem("fuse", f"{device} cannot be opened: {error.strerror}", "run it as root")
        return
    # By the capability, and not by the uid: root of a container lacks it as a rule.
    if not _may_mount(proc_self):
        yield problem(
            "fuse",
            "this process may not mount (no CAP_SYS_ADMIN)",
            "run it as root; in a container: --cap-add SYS_ADMIN",
        )
        return
    yield ok("fuse", f"{device} can be opened, and this process may mount")


def _may_mount(proc_self: Path) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", (proc_self / "status").read_text(), re.MULTILINE)
    return bool(match and int(match[1], 16) >> _CAP_SYS_ADMIN & 1)


def driver(
    wanted: Sequence[tuple[str, str]],
    release: str,
    served: Mapping[str, tuple[str, str]] | None = None,
    inquiry: Inquiry | None = None,
) -> Iterator[Finding]:
    """Check for each root which driver serves it, and why.

    Args:
        wanted: (root, driver) of the configuration. With none, and for a root that is not mounted, the kernel is asked; nothing is
            mounted for that.
        release: the kernel's release.
        served: driver and reason of mounted roots, as the daemon reports them.
        inquiry: how roots are asked.
    """
    inquiry = inquiry or Inquiry()
    # Before the first root is protected this line says what one would get.
    if not wanted:
        yield _driver_of("a new root", "auto", _offer(None, release), release)
    for root, name in wanted:
        # The daemon knows why it serves a mounted root as it does. To ask the kernel about it would find the
        # overlay, and not the file system below.
        if root in (served or {}):
            driver_name, why = (served or {})[root]
            yield ok("driver", f"{root}: {driver_name}: {why}")
            continue
        try:
            # The kernel makes a file in the root to find out, which waits for an overlay that hangs.
            yield from inquiry.findings(root, partial(_driver_of_root, root, name, release))
        except NoAnswer as error:
            yield not_looked_at("driver", error)


def system_calls(unfiltered: Iterable[str], offered: Callable[[], str] | None = None) -> Iterator[Finding]:
    """Check whether workers and captures are held to the system calls that they need.

    Args:
        unfiltered: Roots whose worker says that it is not filtered.
        offered: Says why this machine cannot filter system calls; empty where it can.
    """
    from ciuic.system import seccomp

    lacking = (offered or seccomp.offered)()
    if lacking:
        yield warning(
            "system calls",
            f"workers and captures are not filtered: {lacking}",
            "run a kernel with CONFIG_SECCOMP_FILTER; snapshots do not depend on it",
        )
        return
    for root in unfiltered:
        yield warning(
            "system calls",
            f"the worker of {root} is not filtered although this machine could do it",
            "the reason follows system_calls_not_filtered in the log; " + service_manager.log_hint(),
        )
    yield ok("system calls", "what workers and captures have no use for is refused by the kernel (seccomp)")


def _offer(root: str | None, release: str) -> KernelOffer:
    from ciuic.fuse_layer import driver_choice

    directory = None
    # A root that is not there is another check's matter.
    with contextlib.suppress(OSError):
        # O_PATH is enough for the kernel's answer, and takes no right to read the root.
        directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if root is not None else None
    try:
        return driver_choice.ask_kernel(directory, release=release)
    finally:
        if directory is not None:
            os.close(directory)


def _driver_of_root(root: str, name: str, release: str) -> list[Finding]:
    return [_driver_of(root, name, _offer(root, release), release)]


def _driver_of(subject: str, wanted: str, offer: KernelOffer, release: str) -> Finding:
    from ciuic.fuse_layer import driver_choice

    choice = driver_choice.choose(wanted, offer)
    protocol = f" (FUSE {offer.protocol})" if offer.protocol else ""
    message = f"{subject}: {choice.driver}{protocol}: {choice.why}"
    if wanted == "kernel" and not offer.passthrough and not offer.resends:
        return warning(
            "driver",
            f"{subject}: on Linux {release} the kernel driver has no passthrough and its worker cannot be replaced",
            'driver = "auto"',
        )
    if wanted == "pyfuse3" and choice.driver != wanted:
        return warning("driver", message, driver_choice.INSTALL_PYFUSE3)
    # From this version on something of the machine prevents it, such as a stacked file system; before it,
    # nothing can be done.
    if wanted == "auto" and not offer.passthrough and kernel_version(release) >= _PASSTHROUGH_KERNEL:
        return warning("driver", message, "lift what is in the way, or live with about half the throughput")
    return ok("driver", message)


def schedulers(
    places: Iterable[Path], mounts: Sequence[Mount], io_priority: str, sys: Path = Path("/sys")
) -> Iterator[Finding]:
    """Check whether the block devices below these directories heed the idle I/O class."""
    seen: set[str] = set()
    for place in places:
        for device in block_devices(place, mounts, sys):
            # Roots and repository may share a disk, and mapped devices the disks below them.
            if device.name in seen:
                continue
            seen.add(device.name)
            yield _scheduler_finding(device, io_priority)
    if not seen:
        yield ok("io scheduler", "no block device of its own below roots and repository")


def _scheduler_finding(device: Path, io_priority: str) -> Finding:
    text = (device / "queue" / "scheduler").read_text()
    # The kernel puts the one in use between brackets: `none [mq-deadline] bfq`.
    match = re.search(r"\[([^\]]+)\]", text)
    chosen = match[1] if match else text.strip()
    # Without a class there is nothing to heed. Captures throttle themselves in any case, so that this is only
    # a warning.
    if chosen in HONOURS_IDLE or io_priority == "none":
        return ok("io scheduler", f"{device.name}: {chosen}")
    return warning(
        "io scheduler",
        f"{device.name}: under {chosen} the I/O class {io_priority} does nothing; capture shares the disk evenly",
        f"if the job's latency suffers: echo bfq > /sys/block/{device.name}/queue/scheduler, or IOWeight= in ciuic-capture.slice",
    )


def block_devices(place: Path, mounts: Sequence[Mount], sys: Path = Path("/sys")) -> list[Path]:
    """The directories in /sys of the disks below ``place``: partitions and mapped devices are followed down."""
    from ciuic.config.places import mount_holding

    mount = mount_holding(place, mounts)
    if mount is None:
        return []
    number = mount.device
    # btrfs and others have an anonymous device; their source names a real one.
    if number[0] == 0:
        try:
            source = os.stat(mount.source)
        except OSError:
            return []
        if not stat.S_ISBLK(source.st_mode):
            return []
        number = (os.major(source.st_rdev), os.minor(source.st_rdev))
    node = sys / "dev" / "block" / f"{number[0]}:{number[1]}"
    return _disks(node.resolve()) if node.exists() else []


def _disks(node: Path) -> list[Path]:
    # A mapped device (LVM, dm-crypt, RAID) has no queue that counts: requests are ordered in those of its
    # disks.
    below = sorted((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    if below:
        return [disk for slave in below for disk in _disks(slave.resolve())]
    # A partition's queue is its disk's.
    for candidate in (node, node.parent):
        if (candidate / "queue" / "scheduler").is_file():
            return [candidate]
    return []


def libraries(names: Sequence[str] = ("obstore", "blake3", "cryptography")) -> Iterator[Finding]:
    """Packages that a configured remote needs: an installation from before they came with every one may lack them."""
    # Found and not imported: an import takes a tenth of a second.
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        yield problem(
            "libraries",
            f"remotes need {', '.join(missing)}, not installed here",
            "pip install --upgrade ciuic",
        )
    else:
        yield ok("libraries", "what remotes need is installed")


def pressure(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Check whether the kernel reports how long tasks wait for I/O; captures throttle themselves by it."""
    try:
        text = (proc / "pressure" / "io").read_text()
    except OSError:
        yield warning(
            "io pressure",
            "the kernel keeps no pressure figures",
            "boot with psi=1 to see whether I/O is waited for",
        )
        return
    # `some`, at least one task waited: the figure by which captures throttle themselves (docs/daemon.md).
    match = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    share = match[1] if match else "?"
    yield ok("io pressure", f"tasks waited for I/O during {share} % of the last 10 s")


def clock() -> Iterator[Finding]:
    """Check whether the clock is synchronized: snapshots are chosen, and removed, by time."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    # Zeroed, and so modes = 0: the clock is only read, which takes no privilege. No module of Python's has
    # this call.
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    if state == _TIME_ERROR:
        yield warning(
            "clock", "the clock is not synchronised", "run chrony, systemd-timesyncd or the host's own means"
        )
    # A filter of system calls refuses it, as in some containers: nothing can be done from here.
    elif state < 0:
        yield warning(
            "clock",
            f"the kernel does not say whether the clock is kept: {os.strerror(ctypes.get_errno())}",
            "none needed",
        )
    else:
        yield ok("clock", "synchronised")


def systemd_unit(system: Systemd, *, daemon_answers: bool) -> Iterator[Finding]:
    """Check whether the daemon starts with the machine."""
    if not system.runs:
        if daemon_answers:
            yield ok("service", "systemd does not run this machine; the daemon was started by something else")
        else:
            yield warning(
                "service", "systemd does not run this machine", "have your supervisor run: ciuic daemon"
            )
        return
    facts = system.facts()
    if not facts["installed"]:
        yield warning("service", "ciuic.service is not installed", "ciuic service install")
    elif facts["enabled"] != "enabled":
        yield warning(
            "service",
            f"ciuic.service is {facts['enabled']}: it does not start with the machine",
            "systemctl enable ciuic",
        )
    # A problem, where the other two are warnings: what was set up to run does not.
    elif facts["active"] != "active":
        yield problem(
            "service", f"ciuic.service is {facts['active']}", "systemctl start ciuic; journalctl -u ciuic"
        )
    else:
        yield ok("service", "ciuic.service is enabled and active")
