"""Find processes and mounts that reach a directory without going through the overlay that is (or will be) mounted over it.

A process that had a file open, a writable mapping or its working directory below a root before the overlay was mounted goes on
using the backing directory, unseen. So does a container that bind-mounted a root, or a directory in it or above it, before; and a
bind mount of the root, or of a part of it, at another place of the host. Through a bind mount inside the root, changes pass
the overlay, but under a name that snapshots do not enter.

Guarantees: only the text of /proc (readlink, fdinfo, mountinfo, maps) and O_PATH descriptors are used, and no request goes to a
mounted file system, so a dead or hanging mount cannot block the search. A descriptor costs a bounded amount of work, however deep
it leads: a directory whose path is longer than the kernel reports (PATH_MAX) is located by climbing 1,365 levels with one system
call, at most `MAX_JUMPS` times, and all climbs together end at a deadline. What could not be found out is reported as unknown. The
directory is recognised in every mount namespace (a container may have it bind-mounted elsewhere) by its file system and the path
inside, not by its name alone. Descriptors that go through the overlay are told apart by their mount id. Root is needed to see other
users' processes; processes that may not be examined are left out. One process stands for each mount namespace; a namespace that no
process is in, and a mount that cannot be written through, are left out.

References:
    mount_namespaces(7), on propagation; proc_pid_mountinfo(5)
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ciuic.system import mountinfo
from ciuic.system.mountinfo import Mount

LEVELS_PER_JUMP: Final = 1365
"""Levels of one system call: so many times ``..`` make a path of 4,095 bytes, the longest that the kernel takes."""
MAX_JUMPS: Final = 64
"""Limit of system calls of one climb; they reach 87,000 levels, which take a process minutes to create."""
CLIMBS_SECONDS: Final = 2.0
"""Time for all climbs of a scan, enough for some ten thousand."""
_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Climber:
    """Locates directories during one scan of /proc."""

    def __init__(
        self, *, seconds: float = CLIMBS_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._left_seconds = seconds
        """Time left for climbs. Only climbs count: the rest of the scan takes as long as it needs."""

    def nearest_name(self, link: Path) -> bytes | None:
        """Return the path of the nearest directory, at or above the one that a link of /proc leads to, that has a reportable path.

        Returns None where that is not known: for what is no directory, below too many levels, or when the time is over.
        """
        if self._left_seconds <= 0:
            return None
        began = self._clock()
        try:
            return self._climb(link)
        finally:
            self._left_seconds -= self._clock() - began

    def _climb(self, link: Path) -> bytes | None:
        try:
            here = os.open(link, _FLAGS)
        except NotADirectoryError:
            # A file has no `..` by which to climb.
            return None
        try:
            for _ in range(MAX_JUMPS):
                above = _up(here, LEVELS_PER_JUMP)
                if _name(above) is not None:
                    os.close(above)
                    return _lowest_named(here)
                os.close(here)
                here = above
            return None
        finally:
            os.close(here)


def _lowest_named(here: int) -> bytes | None:
    """Return the path of the lowest directory above ``here`` that has a reportable path."""
    # Bisection in 11 steps: from some level on, all directories above have a path short enough.
    low, high, best = 0, LEVELS_PER_JUMP, None
    while low < high:
        middle = (low + high) // 2
        above = _up(here, middle)
        try:
            name = _name(above)
        finally:
            os.close(above)
        if name is None:
            low = middle + 1
        else:
            high, best = middle, name
    if best is not None:
        return best
    above = _up(here, low)
    try:
        return _name(above)
    finally:
        os.close(above)


def _up(fd: int, levels: int) -> int:
    return os.open(b"/".join([b".."] * levels) or b".", _FLAGS, dir_fd=fd)


def _name(fd: int) -> bytes | None:
    """Return the path of a descriptor; None where it is too long."""
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None


UseKind = Literal["open", "mapping", "working directory", "root directory"]
OVERLAY_FS_TYPE = b"fuse.ciuic"
_TOO_LONG = b"(a path longer than can be shown)"
# Uses kept of one process.
_MAX_USES = 64


class Use(NamedTuple):
    """A descriptor, mapping or directory by which a process reaches something below the directory."""

    kind: UseKind
    path: bytes
    """Path as the process sees it; " (deleted)" follows the name of a removed file."""
    writes: bool
    """True if files can be changed through it: a file or mapping open for writing, or a directory for relative paths."""
    known: bool = True
    """False: its path is longer than the kernel reports, and it may lie outside the directory."""


class Bypasser(NamedTuple):
    """A process that bypasses the overlay."""

    pid: int
    command: str
    uid: int
    uses: tuple[Use, ...]

    @property
    def writes(self) -> bool:
        """True if it can change the backing directory through one of its uses."""
        return any(use.writes for use in self.uses)

    @property
    def known(self) -> bool:
        """True if one of these uses certainly lies in the directory."""
        return any(use.writes and use.known for use in self.uses)


class Location(NamedTuple):
    """A directory as a path inside a file system, independent of its names in mount namespaces."""

    device: tuple[int, int]
    path: bytes


def find_bypassing(
    root: Path | str | bytes,
    *,
    ignore_pids: Collection[int] = (),
    only_pids: Collection[int] | None = None,
    proc: Path = Path("/proc"),
) -> list[Bypasser]:
    """Return the processes that use something at or below ``root``'s backing directory, in the order of their pids.

    The result is the same before and after the overlay is mounted: what was opened before has another mount id than what is
    opened through it. In a chroot where /proc/self/mountinfo does not show the root's file system, no process can be found.

    Args:
        root: absolute path, covered by ciuic's overlay or not.
        ignore_pids: processes to skip; an overlay worker holds the backing directory by design.
        only_pids: examine these processes alone.
        proc: mount point of proc.
    """
    path = _real_path(root)
    try:
        location = locate(path, mountinfo.read(proc / "self"))
    except ValueError:
        # `protect` has to work in such a chroot, too.
        return []
    prefixes = _Prefixes(location)
    processes = sorted(int(name) for name in os.listdir(proc) if name.isdigit())
    # All mount tables first: a descriptor may lead through a mount of another process's namespace.
    for pid in processes:
        prefixes.learn(proc / str(pid))
    found = []
    climber = Climber()
    for pid in processes:
        if pid in ignore_pids or (only_pids is not None and pid not in only_pids):
            continue
        uses = _bounded(_uses(proc / str(pid), prefixes, climber))
        if uses:
            found.append(_describe(proc / str(pid), pid, uses))
    return found


def _real_path(root: Path | str | bytes) -> bytes:
    """Return an absolute path with symbolic links resolved, except in its last component.

    An overlay over that may hang, and lstat(2) would wait for it.
    """
    path = os.fsencode(root)
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def locate(path: bytes, mounts: list[Mount]) -> Location:
    """Return the location of ``path`` beneath any overlay of ciuic mounted on it. ValueError without a mount that contains it."""
    best = _mount_beneath(path, mounts)
    return Location(best.device, joined(best.root, path[len(best.mount_point.rstrip(b"/")) :]))


def _mount_beneath(path: bytes, mounts: list[Mount]) -> Mount:
    """Return the mount that holds ``path`` beneath any overlay of ciuic mounted on it. ValueError without one."""
    best: Mount | None = None
    for mount in mounts:
        # The overlay itself is passed over, so that its backing directory has one location before and after
        # the mount.
        ours = mount.fs_type == OVERLAY_FS_TYPE and mount.mount_point == path
        if ours or not is_below(path, mount.mount_point):
            continue
        # `>=`: of two mounts on one mount point the later covers the earlier.
        if best is None or len(mount.mount_point) >= len(best.mount_point):
            best = mount
    if best is None:
        raise ValueError(f"no mount contains {os.fsdecode(path)}")
    return best


def name_inside(location: Location, mount: Mount) -> bytes | None:
    """Return the path of ``location`` through ``mount``; None if the mount does not show it.

    A mount of a directory below the location shows only that directory, and its whole mount point is the answer.
    """
    if mount.device != location.device:
        return None
    if is_below(location.path, mount.root):
        return joined(mount.mount_point, location.path[len(mount.root.rstrip(b"/")) :])
    if is_below(mount.root, location.path):
        return mount.mount_point
    return None


class _Prefixes:
    """The paths of one location, by mount namespace and by mount id (which is unique in the whole system)."""

    def __init__(self, location: Location) -> None:
        self.device = location.device
        self.by_mount: dict[int, bytes] = {}
        self._location = location
        self._by_namespace: dict[str, frozenset[bytes]] = {}

    def learn(self, process: Path) -> None:
        """Read the mount table of the process's namespace, once for each namespace."""
        try:
            namespace = os.readlink(process / "ns/mnt")
            # A chrooted process sees only a part of its namespace's mounts, under other names.
            if namespace in self._by_namespace or os.readlink(process / "root") != "/":
                return
            mounts = mountinfo.read(process)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # It has ended, or belongs to another user.
            return
        named = {mount.mount_id: name_inside(self._location, mount) for mount in mounts}
        known = {mount_id: name for mount_id, name in named.items() if name is not None}
        self.by_mount.update(known)
        self._by_namespace[namespace] = frozenset(known.values())

    def of(self, process: Path) -> frozenset[bytes]:
        """Return the paths of the location in the process's namespace."""
        return self._by_namespace.get(os.readlink(process / "ns/mnt"), frozenset())

    def covers(self, text: bytes) -> bool:
        """Return whether the path could be below the location, in any namespace: a cheap first test."""
        return any(is_below(text, prefix) for prefix in self.by_mount.values())

    def covers_through(self, mount_id: int, text: bytes) -> bool:
        """Return whether a path seen through that mount is at or below the location: the exact test."""
        prefix = self.by_mount.get(mount_id)
        return prefix is not None and is_below(text, prefix)


def _bounded(uses: Iterator[Use]) -> tuple[Use, ...]:
    """Return the first uses, and one that can write if there is one: a process may have a million."""
    kept: list[Use] = []
    for use in uses:
        if len(kept) < _MAX_USES or use.writes > any(other.writes for other in kept):
            kept.append(use)
        elif any(other.writes and other.known for other in kept):
            break
    return tuple(kept)


def _uses(process: Path, prefixes: _Prefixes, climber: Climber) -> Iterator[Use]:
    try:
        yield from _directories(process, prefixes, climber)
        yield from _open_files(process, prefixes, climber)
        yield from _mappings(process, prefixes)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # It has ended meanwhile, or belongs to another user.
        return


def _directories(process: Path, prefixes: _Prefixes, climber: Climber) -> Iterator[Use]:
    names: tuple[tuple[str, UseKind], ...] = (("cwd", "working directory"), ("root", "root directory"))
    for name, kind in names:
        text = _link_or_none(process / name)
        if text is not None and not prefixes.covers(text):
            continue
        mount_id = _mount_id_of_link(process / name)
        yield from _use(kind, text, mount_id, True, process / name, prefixes, climber)


def _use(
    kind: UseKind,
    text: bytes | None,
    mount_id: int,
    writes: bool,
    link: Path,
    prefixes: _Prefixes,
    climber: Climber,
) -> Iterator[Use]:
    """Yield the use that a link of /proc stands for. ``text`` None: the kernel does not report where it leads."""
    # Another file system, or through an overlay. Checked before the climb: a search that climbed from every
    # deep directory of a process took minutes.
    if mount_id not in prefixes.by_mount:
        return
    if text is None:
        text = climber.nearest_name(link)
        if text is None:
            if writes:
                # It may lie in the directory, and counts as such: exactness before cost
                # (docs/decisions/trust.md).
                yield Use(kind, _TOO_LONG, writes=True, known=False)
            return
    if prefixes.covers_through(mount_id, text):
        yield Use(kind, text, writes=writes)


def _open_files(process: Path, prefixes: _Prefixes, climber: Climber) -> Iterator[Use]:
    for number in os.listdir(process / "fd"):
        try:
            text = _link_or_none(process / "fd" / number)
            if text is not None and not prefixes.covers(text):
                continue
            facts = _fdinfo(process / "fdinfo" / number)
            writes = _can_write(int(facts[b"flags"], 8))
            link = process / "fd" / number
            yield from _use("open", text, int(facts[b"mnt_id"]), writes, link, prefixes, climber)
        except FileNotFoundError:
            # Closed meanwhile.
            continue


def _link_or_none(link: Path) -> bytes | None:
    """Return the target of a link of /proc; None if it exceeds PATH_MAX, which the kernel does not report."""
    try:
        return os.readlink(os.fsencode(link))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None


def _can_write(flags: int) -> bool:
    """Return whether a descriptor is a file open for writing, or a directory (O_PATH too), below which openat(2) can write."""
    return bool(flags & os.O_ACCMODE) or bool(flags & os.O_DIRECTORY)


def _mappings(process: Path, prefixes: _Prefixes) -> Iterator[Use]:
    """Yield shared writable mappings, which outlive the descriptor that they were made from."""
    # proc_pid_maps(5) has no mount id: file system and name in the process's own namespace must suffice.
    names = prefixes.of(process)
    if not names:
        return
    device = b"%02x:%02x" % prefixes.device
    # Not splitlines(): of all control characters in a file's name the kernel escapes the newline alone.
    for line in (process / "maps").read_bytes().split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or fields[3] != device or fields[1][1:2] != b"w" or fields[1][3:4] != b"s":
            continue
        # A backslash is not escaped: four characters that look like a newline may be the name itself.
        for text in (fields[5].replace(b"\\012", b"\n"), fields[5]):
            if any(is_below(text, name) for name in names):
                yield Use("mapping", text, writes=True)
                break


def _fdinfo(path: Path) -> dict[bytes, bytes]:
    facts: dict[bytes, bytes] = {}
    # Bytes, and split at newlines alone: what drivers add below (io_uring: names of files) is not text.
    for line in path.read_bytes().split(b"\n"):
        key, colon, value = line.partition(b":")
        # The kernel's own lines come first.
        if colon:
            facts.setdefault(key, value.strip())
    return facts


def _mount_id_of_link(link: Path) -> int:
    # O_PATH resolves the kernel's link without a request to the file system that it leads to.
    fd = os.open(link, os.O_PATH)
    try:
        return int(_fdinfo(Path(f"/proc/self/fdinfo/{fd}"))[b"mnt_id"])
    finally:
        os.close(fd)


def _describe(process: Path, pid: int, uses: tuple[Use, ...]) -> Bypasser:
    try:
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        command = os.fsdecode(b" ".join(words) or (process / "comm").read_bytes().strip())
        uid = process.stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        command, uid = "", -1
    # A command line is any bytes. Those that do not decode would fail in the status document and in the log.
    return Bypasser(pid, command.encode("utf-8", "backslashreplace").decode(), uid, uses)


def is_below(path: bytes, top: bytes) -> bool:
    """Return whether a path is at or below another: /data2 is not below /data."""
    return top == b"/" or path == top or path.startswith(top + b"/")


def joined(top: bytes, rest: bytes) -> bytes:
    """Return a path below another, without a slash at its end."""
    return (top.rstrip(b"/") + b"/" + rest.strip(b"/")).rstrip(b"/") or b"/"


REMEDY: Final = (
    "end the container and start it again now that the root is protected, or unmount the bind mount; "
    "until then captures compare the whole tree (docs/containers.md)"
)


class BypassingMount(NamedTuple):
    """A place at which a part of a root is reached without its overlay."""

    place: bytes
    """Where, as the processes of the mount namespace name it."""
    shows: bytes
    """The root, or what of it is reached there, as this process names it."""
    pid: int
    """A process of the mount namespace."""
    command: str
    elsewhere: bool
    """True if this process is in another mount namespace."""

    def __str__(self) -> str:
        """Say what is reached and where."""
        place, shows = (name.decode("utf-8", "backslashreplace") for name in (self.place, self.shows))
        owner = f" in the mount namespace of process {self.pid} ({self.command})" if self.elsewhere else ""
        return f"{shows} at {place}{owner}"


class _Namespace(NamedTuple):
    """The mounts that a process sees."""

    identity: str
    pid: int
    mounts: list[Mount]


def find_bypassing_mounts(
    root: Path | str | bytes, *, ignore_pids: Collection[int] = (), proc: Path = Path("/proc")
) -> list[BypassingMount]:
    """Return the mounts through which the backing directory of ``root``, or a part of it, can be written past the overlay.

    The result is the same before and after the overlay is mounted: before, it is computed which mounts the overlay will be propagated
    to. In a chroot where /proc/self/mountinfo does not show the root's file system, nothing can be found.

    Args:
        root: absolute path, covered by ciuic's overlay or not.
        ignore_pids: processes that stand for no mount namespace.
        proc: mount point of proc.
    """
    path = _real_path(root)
    own = mountinfo.read(proc / "self")
    try:
        location = locate(path, own)
    except ValueError:
        return []
    namespaces = _namespaces(proc, ignore_pids)
    covered = _receivers(path, location, own, [one.mounts for one in namespaces])
    here = os.readlink(proc / "self/ns/mnt")
    found = []
    for one in namespaces:
        ways = [
            (mount, place)
            for mount in one.mounts
            if mount.mount_id not in covered
            and (place := name_inside(location, mount)) is not None
            and not _is_read_only(mount)
            and _is_reached(mount, place, one.mounts)
        ]
        command = _command(proc / str(one.pid)) if ways else ""
        for mount, place in ways:
            below = mount.root[len(location.path) :] if is_below(mount.root, location.path) else b""
            found.append(
                BypassingMount(place, joined(path, below), one.pid, command, elsewhere=one.identity != here)
            )
    return found


def _namespaces(proc: Path, ignore_pids: Collection[int]) -> list[_Namespace]:
    """Return what is seen in each mount namespace, by its first process that may be examined."""
    seen: dict[tuple[str, str], _Namespace] = {}
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        if pid in ignore_pids:
            continue
        process = proc / str(pid)
        try:
            # A chrooted process sees a part of its namespace's mounts.
            view = os.readlink(process / "ns/mnt"), os.readlink(process / "root")
            if view not in seen and (view[0], "/") not in seen:
                seen[view] = _Namespace(view[0], pid, mountinfo.read(process))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # It has ended, or belongs to another user.
            continue
    return [one for (identity, top), one in seen.items() if top == "/" or (identity, "/") not in seen]


def _receivers(path: bytes, location: Location, own: list[Mount], tables: Iterable[list[Mount]]) -> set[int]:
    """Return the mounts on which an overlay will appear when it is mounted over ``path``; none where it is mounted."""
    if any(mount.fs_type == OVERLAY_FS_TYPE for mount in mountinfo.mounts_at(path, own)):
        return set()
    target = _mount_beneath(path, own)
    candidates = [
        mount
        for table in tables
        for mount in table
        if mount.device == location.device and is_below(location.path, mount.root)
    ]
    groups = {target.peers} - {0}
    while more := {mount.peers for mount in candidates if mount.master in groups and mount.peers} - groups:
        groups |= more
    return {target.mount_id} | {
        mount.mount_id for mount in candidates if groups & {mount.peers, mount.master}
    }


def _is_reached(mount: Mount, place: bytes, mounts: Sequence[Mount]) -> bool:
    """Return whether a path through a mount is not hidden by another mount, or hidden by overlays alone, which show what they hide."""
    on_it = [other for other in mounts if other.parent_id == mount.mount_id and other is not mount]
    if any(is_below(place, other.mount_point) for other in on_it):
        return False
    by_id = {other.mount_id: other for other in mounts}
    # Bounded: a table that is read while mounts change may have a cycle.
    for _ in mounts:
        parent = by_id.get(mount.parent_id)
        if parent is None or parent is mount:
            return True
        for other in mounts:
            hides = other.parent_id == parent.mount_id and other.fs_type != OVERLAY_FS_TYPE
            if (
                hides
                and other.mount_point != mount.mount_point
                and is_below(mount.mount_point, other.mount_point)
            ):
                return False
        mount = parent
    return True


def _command(process: Path) -> str:
    """Return the short name of a process; empty when it has ended."""
    # Not its command line: reading that waits for the process's memory map, which its owner can keep locked.
    try:
        return (process / "comm").read_bytes().strip().decode("utf-8", "backslashreplace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_read_only(mount: Mount) -> bool:
    return any(b"ro" in options.split(b",") for options in (mount.options, mount.super_options))
