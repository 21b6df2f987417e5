"""Doctor's checks of the places: roots, repository, their file systems, free space, and what covers a path.

Guarantees: nothing is left behind (the clone that tries a file system has no name), and no check waits for a root that
does not answer: what touches a root goes through `Inquiry`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ciuic.cli.doctor.inquiry import Finding, Inquiry, NoAnswer, not_looked_at, ok, problem, warning
from ciuic.cli.shared.names import shown, shown_text
from ciuic.errors import CiuicError
from ciuic.system.disk_space import Reserve, available_bytes, measurable, reserve_of, total_bytes
from ciuic.system.mountinfo import Mount, first_border
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from ciuic.config import Config, RootConfig
    from ciuic.protocol.control_types import StatusDocument
    from ciuic.repository import Repository
    from ciuic.types import SnapshotId

# _IOW(0x94, 9, int) of linux/fs.h.
_FICLONE: Final = 0x40049409
# The first is also the share that captures leave to others by default (system/disk_space.py).
_LOW_SHARE: Final = 0.05
_VERY_LOW_SHARE: Final = 0.01
_NS: Final = 1_000_000_000
_CLOCK_SECONDS: Final = 5
"""Time by which a snapshot may be later than now without a finding: clocks are corrected."""


def roots(
    config: Config, mounts: Sequence[Mount], *, look_for_bypass: bool, inquiry: Inquiry | None = None
) -> Iterator[Finding]:
    """Each root: fit to be protected, mounted, answering, and (unless the daemon has said so) nobody going round it."""
    from ciuic.config import check_overlaps

    inquiry = inquiry or Inquiry()
    if not config.roots:
        yield warning("roots", "no directory is protected", "ciuic protect PATH")
    for trouble in check_overlaps(config.roots, mounts):
        yield problem("roots", str(trouble), trouble.hint)
    for root in config.roots:
        try:
            troubles = inquiry.findings(root.path, partial(_troubles, root, mounts))
        except NoAnswer:
            troubles = [_no_answer(root, mounts)]
        yield from troubles
        # A path that is no directory, or inside another root, would only cause more lines about the same.
        if not troubles:
            yield _mounted_root(root, mounts, inquiry)
        if look_for_bypass and not troubles:
            yield from _bypassing(root)


def _troubles(root: RootConfig, mounts: Sequence[Mount]) -> list[Finding]:
    from ciuic.config import check_root

    return [problem("roots", str(trouble), trouble.hint) for trouble in check_root(root, mounts)]


def _mounted_root(root: RootConfig, mounts: Sequence[Mount], inquiry: Inquiry) -> Finding:
    from ciuic.config import is_ciuic_mount

    name = shown_text(str(root.path))
    if not is_ciuic_mount(root.path, mounts):
        return problem(
            "roots", f"{name} is not mounted: changes are not tracked", "start the daemon; see: ciuic status"
        )
    # Mounted is not served: a worker that was killed leaves ENOTCONN, one that hangs an endless wait.
    if not inquiry.answers(root.path):
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
    source = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.write(source, b"ciuic" * 1000)
        target = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
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
    inquiry: Inquiry | None = None,
    absent: str = "",
) -> Iterator[Finding]:
    """Free bytes and inodes, for the store and for the undo logs that lie below each root; each file system once. Then the reserve.

    Args:
        config: The configuration.
        repository: Where the repository is or will be.
        mounts: What is mounted.
        status: What the daemon says; None where none runs.
        inquiry: Asks directories that may not answer.
        absent: Why the repository's disk is not there; empty if it is.
    """
    from ciuic.config.places import mount_holding

    inquiry = inquiry or Inquiry()
    # Of roots as well: their undo logs are on the same file systems.
    seen: set[tuple[int, int]] = set()
    disk = Path(measurable(repository))
    for place in (*([] if absent else [disk]), *(root.path for root in config.roots)):
        try:
            found = inquiry.findings(place, partial(_free_space, config, place))
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


def coverage(paths: Sequence[bytes], config: Config, inquiry: Inquiry | None = None) -> Iterator[Finding]:
    """Check for each path whether a root covers it and captures include it."""
    inquiry = inquiry or Inquiry()
    for path in paths:
        # By the root above it as it is written, which may be known not to answer. A link into another root is
        # followed in the child.
        above = next((str(root.path) for root in config.roots if _is_below(path, root)), os.fsdecode(path))
        try:
            yield from inquiry.findings(above, partial(_coverage, path, config))
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
