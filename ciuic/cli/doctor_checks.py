"""Checks of `ciuic doctor`: the machine (kernel, FUSE, driver, disks, clock, systemd) and the places (roots, repository, free space).

Guarantees: nothing is changed and nothing is left behind (the clone that tries a file system has no name); a file that is not
there is a fact and not a failure. No check waits for a root that does not answer: what touches a root goes through `Probes`.
Where a check reads /proc, /sys or /dev, that directory is an argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ciuic.cli.probes import Finding, NoAnswer, Probes, not_looked_at, ok, problem, warning
from ciuic.cli.shared.messages import shown, shown_text
from ciuic.errors import CiuicError, pip_install
from ciuic.system import service_manager
from ciuic.system.disk_space import Reserve, available_bytes, measurable, reserve_of, total_bytes
from ciuic.system.mountinfo import Mount, first_border
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from ciuic.cli.shared.systemd import Systemd
    from ciuic.config import Config, RootConfig
    from ciuic.fuse_layer.driver_choice import KernelOffer
    from ciuic.protocol.control_types import StatusDocument
    from ciuic.repository import Repository
    from ciuic.types import SnapshotId


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
    version = _kernel_version(release)
    if version < _OLDEST_KERNEL:
        needed = ".".join(map(str, _OLDEST_KERNEL))
        yield warning(
            "kernel", f"Linux {release} is older than what ciuic is tested with", f"{needed} or later"
        )
    else:
        yield ok("kernel", f"Linux {release}")


def _kernel_version(release: str) -> tuple[int, int]:
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
        os.close(os.open(device, os.O_RDWR))
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
    probes: Probes | None = None,
) -> Iterator[Finding]:
    """Check for each root which driver serves it, and why.

    Args:
        wanted: (root, driver) of the configuration. With none, and for a root that is not mounted, the kernel is asked; nothing is
            mounted for that.
        release: the kernel's release.
        served: driver and reason of mounted roots, as the daemon reports them.
        probes: how roots are asked.
    """
    probes = probes or Probes()
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
            yield from probes.findings(root, partial(_driver_of_root, root, name, release))
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
        directory = os.open(root, os.O_PATH | os.O_DIRECTORY) if root is not None else None
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
    if wanted == "auto" and not offer.passthrough and _kernel_version(release) >= _PASSTHROUGH_KERNEL:
        return warning("driver", message, "lift what is in the way, or live with about half the throughput")
    return ok("driver", message)


def schedulers(
    places: Iterable[Path], mounts: Sequence[Mount], io_priority: str, sys: Path = Path("/sys")
) -> Iterator[Finding]:
    """Check whether the block devices below these directories heed the idle I/O class."""
    seen: set[str] = set()
    for place in places:
        for device in _block_devices(place, mounts, sys):
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


def _block_devices(place: Path, mounts: Sequence[Mount], sys: Path = Path("/sys")) -> list[Path]:
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
            pip_install(),
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


def systemd_unit(system: Systemd, *, daemon_answers: bool, places: Sequence[Path] = ()) -> Iterator[Finding]:
    """Check whether the daemon starts with the machine, and whether the upload may write to remotes that are directories."""
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
    if facts["upload"]["installed"] and not system.has_places(places):
        yield problem(
            "service",
            f"ciuic-upload.service may not write to {', '.join(shown_text(str(place)) for place in places)}",
            "ciuic service install",
        )


# _IOW(0x94, 9, int) of linux/fs.h.
_FICLONE: Final = 0x40049409
# The first is also the share that captures leave to others by default (system/disk_space.py).
_LOW_SHARE: Final = 0.05
_VERY_LOW_SHARE: Final = 0.01
_NS: Final = 1_000_000_000
_CLOCK_SECONDS: Final = 5
"""Time by which a snapshot may be later than now without a finding: clocks are corrected."""


def roots(
    config: Config, mounts: Sequence[Mount], *, look_for_bypass: bool, probes: Probes | None = None
) -> Iterator[Finding]:
    """Each root: fit to be protected, mounted, answering, and (unless the daemon has said so) nobody going round it."""
    from ciuic.config import check_overlaps

    probes = probes or Probes()
    if not config.roots:
        yield warning("roots", "no directory is protected", "ciuic protect PATH")
    for trouble in check_overlaps(config.roots, mounts):
        yield problem("roots", str(trouble), trouble.hint)
    for root in config.roots:
        try:
            troubles = probes.findings(root.path, partial(_troubles, root, mounts))
        except NoAnswer:
            troubles = [_no_answer(root, mounts)]
        yield from troubles
        # A path that is no directory, or inside another root, would only cause more lines about the same.
        if not troubles:
            yield _mounted_root(root, mounts, probes)
        if look_for_bypass and not troubles:
            yield from _bypassing(root)


def _troubles(root: RootConfig, mounts: Sequence[Mount]) -> list[Finding]:
    from ciuic.config import check_root

    return [problem("roots", str(trouble), trouble.hint) for trouble in check_root(root, mounts)]


def _mounted_root(root: RootConfig, mounts: Sequence[Mount], probes: Probes) -> Finding:
    from ciuic.config import is_ciuic_mount

    name = shown_text(str(root.path))
    if not is_ciuic_mount(root.path, mounts):
        return problem(
            "roots", f"{name} is not mounted: changes are not tracked", "start the daemon; see: ciuic status"
        )
    # Mounted is not served: a worker that was killed leaves ENOTCONN, one that hangs an endless wait.
    if not probes.answers(root.path):
        return _no_answer(root, mounts)
    return ok("roots", f"{name} is mounted and answers")


def _no_answer(root: RootConfig, mounts: Sequence[Mount]) -> Finding:
    from ciuic.config import is_ciuic_mount

    name = shown_text(str(root.path))
    if is_ciuic_mount(root.path, mounts):
        return problem(
            "roots",
            f"{name} is mounted, but does not answer",
            f"restart the daemon; at worst: umount -l {name}",
        )
    return problem("roots", f"{name} does not answer", "see what its file system waits for: dmesg")


def _bypassing(root: RootConfig) -> Iterator[Finding]:
    from ciuic.system.bypass import REMEDY, find_bypassing, find_bypassing_mounts

    name = shown_text(str(root.path))
    for process in find_bypassing(root.path, ignore_pids={os.getpid()}):
        # Overlay workers hold the backing directory by design, and outlive their daemon.
        if process.writes and "ciuic.fuse_layer" not in process.command:
            yield warning(
                "roots",
                f"{name}: process {process.pid} ({shown_text(process.command)}) goes round the overlay",
                "restart it; until then captures compare the whole tree",
            )
    for mount in find_bypassing_mounts(root.path, ignore_pids={os.getpid()}):
        yield warning(
            "roots", f"{name} can be written without passing the overlay: {shown_text(str(mount))}", REMEDY
        )


def file_systems(
    config: Config, repository: Path, mounts: Sequence[Mount], absent: str = ""
) -> Iterator[Finding]:
    """Kind of file system below roots and, unless its disk is absent, repository; reflinks, and whether one disk holds both."""
    from ciuic.config.places import mount_holding

    home = None if absent else mount_holding(measurable(repository), mounts)
    if home is not None:
        yield _reflink_finding(repository, home)
    for root in config.roots:
        mount = mount_holding(root.path, mounts)
        if mount is None:
            continue
        kind = os.fsdecode(mount.fs_type)
        yield ok("file system", f"root {shown_text(str(root.path))} is on {kind}")
        # A warning, although it is the default: on one file system extents can be shared, and a broken disk
        # takes both.
        if home is not None and mount.device == home.device:
            yield warning(
                "same disk",
                f"the repository shares a file system with {shown_text(str(root.path))}: one broken disk takes both",
                'ciuic copy DIR on another disk now and then, or name another disk under [repository] path = "…"',
            )


def _reflink_finding(repository: Path, mount: Mount) -> Finding:
    kind = os.fsdecode(mount.fs_type)
    place = shown_text(str(repository))
    try:
        possible = can_clone(Path(measurable(repository)))
    except OSError as error:
        return warning("reflink", f"{place} ({kind}) could not be tried: {error.strerror}", "run it as root")
    if possible:
        return ok("reflink", f"{place} is on {kind}, which shares extents between files")
    return ok("reflink", f"{place} is on {kind}, which cannot share extents: what changed is copied")


def can_clone(directory: Path) -> bool:
    """Return True if FICLONE works in the directory, tried with two nameless files. Raises OSError where none can be made."""
    # Tried, and not concluded from the kind of file system: XFS shares extents only if it was made with
    # reflink=1. Nameless files leave nothing behind, however this process ends.
    source = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.write(source, b"ciuic" * 1000)
        target = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            fcntl.ioctl(target, _FICLONE, source)
        except OSError as error:
            # Kinds of file systems differ in how they say that they cannot; other errors, such as ENOSPC, say
            # nothing about it.
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS):
                return False
            raise
        finally:
            os.close(target)
    finally:
        os.close(source)
    return True


def space(
    config: Config,
    repository: Path,
    mounts: Sequence[Mount],
    status: StatusDocument | None = None,
    probes: Probes | None = None,
    absent: str = "",
) -> Iterator[Finding]:
    """Free bytes and inodes, for the store and for the undo logs that lie below each root; each file system once. Then the reserve.

    Args:
        config: The configuration.
        repository: Where the repository is or will be.
        mounts: What is mounted.
        status: What the daemon says; None where none runs.
        probes: Asks directories that may not answer.
        absent: Why the repository's disk is not there; empty if it is.
    """
    from ciuic.config.places import mount_holding

    probes = probes or Probes()
    # Of roots as well: their undo logs are on the same file systems.
    seen: set[tuple[int, int]] = set()
    disk = Path(measurable(repository))
    for place in (*([] if absent else [disk]), *(root.path for root in config.roots)):
        try:
            found = probes.findings(place, partial(_free_space, config, place))
        except NoAnswer as error:
            yield not_looked_at("free space", error)
            continue
        except OSError as error:
            yield problem("free space", f"{shown_text(str(place))}: {error.strerror}", "see the other lines")
            continue
        mount = mount_holding(place, mounts)
        if mount is not None and mount.device in seen:
            continue
        seen |= {mount.device} if mount is not None else set()
        yield from found
    if absent:
        # Below the mount point lies another disk, whose free space says nothing about snapshots.
        yield warning("reserve", f"not looked at: {absent}", "mount the repository's disk")
    else:
        yield _reserve_finding(config, disk, status if _is_of(status, repository) else None)


def _is_of(status: StatusDocument | None, repository: Path) -> bool:
    # The daemon may still serve another repository than the configuration or --repo names.
    return status is not None and status.repository.path == str(repository)


def _free_space(config: Config, place: Path) -> list[Finding]:
    facts = os.statvfs(place)
    floor = config.min_free.floor_bytes(facts.f_blocks * facts.f_frsize) if config.min_free else 0
    return [_space_finding(place, facts, floor)]


def _reserve_finding(config: Config, place: Path, status: StatusDocument | None) -> Finding:
    """Compare free space with the reserve, of which only a running daemon knows how much other programs took lately."""
    free = available_bytes(place)
    if status is not None:
        reserve = Reserve(status.repository.reserve_bytes, status.repository.reserve_reason)
    else:
        # Without what others wrote during the last interval, which only a daemon has measured.
        reserve = reserve_of(config.repository.reserve, total_bytes(place))
    text = f"captures leave {human_size(reserve.size_bytes)} free for others ({reserve.reason})"
    if free < reserve.size_bytes:
        return problem(
            "reserve",
            f"{text}, and {human_size(free)} is free: no snapshot can be taken",
            f"free {human_size(reserve.size_bytes - free)} or more on the file system of {shown_text(str(place))}, put "
            "[repository] path on another disk, or lower [repository] reserve",
        )
    return ok("reserve", text)


def _space_finding(place: Path, facts: os.statvfs_result, floor_bytes: int) -> Finding:
    name = shown_text(str(place))
    # f_bavail, as df(1) shows it: what root alone may use is no room for the job.
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    text = f"{name}: {human_size(free)} of {human_size(total)} free"
    remedy = "ciuic prune, a shorter [retention], or more disk"
    if total and free < total * _VERY_LOW_SHARE:
        return problem("free space", text, remedy)
    if total and free < max(total * _LOW_SHARE, floor_bytes):
        return warning("free space", text, remedy)
    # btrfs and others count no inodes: f_files is 0.
    if facts.f_files and facts.f_favail < facts.f_files * _LOW_SHARE:
        return warning(
            "free space",
            f"{name}: only {facts.f_favail} inodes free",
            "remove small files, or a file system with more inodes",
        )
    return ok("free space", text)


def owners(config: Config, repository: Path, *, trusted: bool) -> Iterator[Finding]:
    """Check what users other than root could change of the daemon's configuration, programs and repository."""
    from ciuic.config import check_owners
    from ciuic.repository.trust import foreign_flaw, hint, refusal

    for trouble in check_owners(config):
        say = problem if trouble.severity == "error" else warning
        yield say("owners", shown_text(str(trouble)), trouble.hint)
    flaw = foreign_flaw(repository)
    if flaw is None:
        return
    if trusted:
        yield warning(
            "owners", f"the repository's {shown_text(flaw.found)}", "it is used as the configuration says"
        )
    else:
        yield problem("owners", shown_text(refusal(repository, flaw)), hint(flaw))


def repository_state(repository: Repository | CiuicError, config: Config, now_ns: int) -> Iterator[Finding]:
    """Opened or not, secret or not, readable snapshots, and whether they are taken."""
    if isinstance(repository, CiuicError):
        yield problem("repository", repository.message, repository.hint or "ciuic protect PATH makes one")
        return
    place = shown_text(str(repository.path))
    mode = stat.S_IMODE(os.stat(repository.path).st_mode)
    # The files of all users are in it, without the modes that protect them where they live.
    if mode & 0o077:
        yield warning(
            "repository",
            f"{place} is open to others (mode {mode:04o}): it holds everybody's files",
            f"chmod 700 {place}",
        )
    for bad in repository.snapshots.unreadable():
        yield problem(
            "repository", f"snapshot file {shown_text(bad.path)} cannot be read: {bad.reason}", "ciuic check"
        )
    newest = repository.snapshots.latest()
    if newest is None:
        yield warning("snapshots", "there is no snapshot yet", "ciuic snapshot --wait")
        return
    age_seconds = (now_ns - newest.time_ns) / _NS
    interval = config.schedule.interval_seconds
    text = f"{newest.id} is the newest, {human_duration(age_seconds)} old"
    # Some seconds are left to corrections of the clock.
    if age_seconds < -_CLOCK_SECONDS:
        yield problem(
            "snapshots",
            f"{newest.id}, the newest, is dated {human_duration(-age_seconds)} in the future: the clock was ahead then, or is behind now",
            "set the clock, then ciuic snapshot --wait",
        )
    # Twice: a snapshot is listed only when it is captured, and a capture has until capture.finish_within
    # after the cut.
    elif age_seconds > 2 * interval:
        yield problem(
            "snapshots", f"{text}, with one due every {human_duration(interval)}", "ciuic status says why"
        )
    else:
        yield ok("snapshots", text)
    yield from _dated_in_the_future(repository, newest.id, now_ns)
    yield from _roots_left_behind(repository, config, now_ns, newest.id)


def known_damage(repository: Path) -> Iterator[Finding]:
    """Return damage that is known."""
    from ciuic.protocol.known_damage import DAMAGE_HINT, damage_status, damage_words, read_damage

    damage = damage_status(read_damage(repository))
    if damage is not None:
        yield problem("damage", damage_words(damage), DAMAGE_HINT)


def _dated_in_the_future(repository: Repository, newest: SnapshotId, now_ns: int) -> Iterator[Finding]:
    """Return the older snapshots that a clock which was ahead has dated later than now."""
    for info in repository.snapshots.list(since_ns=now_ns + _CLOCK_SECONDS * _NS):
        if info.id != newest:
            ahead = human_duration((info.time_ns - now_ns) / _NS)
            yield warning(
                "snapshots",
                f"{info.id} is dated {ahead} in the future: the clock was ahead; `latest` and retention go by the order of commits",
                f"ciuic forget {info.id} if nobody needs it",
            )


def _roots_left_behind(
    repository: Repository, config: Config, now_ns: int, newest: SnapshotId
) -> Iterator[Finding]:
    """Return the roots whose own newest snapshot is missing or too old."""
    interval = config.schedule.interval_seconds
    for root in config.roots:
        place = shown_text(str(root.path))
        found = repository.snapshots.latest(os.fsencode(root.path))
        if found is None:
            yield warning("snapshots", f"{place} has no snapshot yet", "ciuic snapshot --wait")
        # The newest of all has had its line already.
        elif found.id != newest and (now_ns - found.time_ns) / _NS > 2 * interval:
            age = human_duration((now_ns - found.time_ns) / _NS)
            yield problem(
                "snapshots",
                f"{found.id} is the newest of {place}, {age} old, with one due every {human_duration(interval)}",
                "ciuic status says why",
            )


def coverage(paths: Sequence[bytes], config: Config, probes: Probes | None = None) -> Iterator[Finding]:
    """Check for each path whether a root covers it and captures include it."""
    probes = probes or Probes()
    for path in paths:
        # By the root above it as it is written, which may be known not to answer. A link into another root is
        # followed in the child.
        above = next((str(root.path) for root in config.roots if _is_below(path, root)), os.fsdecode(path))
        try:
            yield from probes.findings(above, partial(_coverage, path, config))
        except NoAnswer as error:
            yield not_looked_at("coverage", error)


def _is_below(path: bytes, root: RootConfig) -> bool:
    top = os.fsencode(root.path)
    return path == top or path.startswith(top + b"/")


def _coverage(path: bytes, config: Config) -> list[Finding]:
    # Roots are configured with links resolved.
    return [_coverage_of(os.path.realpath(path), config)]


def _coverage_of(path: bytes, config: Config) -> Finding:
    name = shown(path)
    for root in config.roots:
        top = os.fsencode(root.path)
        if not _is_below(path, root):
            continue
        relative = os.path.relpath(path, top) if path != top else b""
        is_dir = os.path.isdir(path)
        # Before its existence: a pattern covers a path that is still to come as well. The root itself is
        # never excluded.
        if relative and config.exclude_matcher(root).match(relative, is_dir):
            return warning(
                "coverage",
                f"{name} is excluded from snapshots",
                "narrow the exclude patterns: ciuic config show",
            )
        if not os.path.lexists(path):
            return warning(
                "coverage",
                f"{name} does not exist; it would be covered by {shown(top)}",
                "check the spelling",
            )
        border = first_border(top, path)
        if border is not None:
            return problem(
                "coverage",
                f"{name} is on another file system, mounted at {shown(border)} below {shown(top)}, which is not captured",
                f"ciuic protect {shown(border)}",
            )
        return ok("coverage", f"{name} is covered by {shown(top)}")
    return problem("coverage", f"{name} is not below any root", "ciuic protect the directory that holds it")
