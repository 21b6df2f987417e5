"""Which processes reach a directory without passing what is (or will be) mounted over it.

A process that had a file open, a writable mapping or its working directory below a root before the overlay was mounted
goes on using the backing directory, unseen. This module finds and names such processes from /proc.

Guarantees: looks only at the text of /proc (readlink, fdinfo, mountinfo, maps) and at O_PATH descriptors, never asks a
mounted file system anything, so a dead or hanging mount cannot block it. A descriptor costs a bounded amount of work, however
deep it leads; what is not known is said to be. Recognises the directory in every mount
namespace (a container that has it bind-mounted elsewhere), by file system and path inside that file system, not by the
name alone; descriptors that do go through the overlay are told apart by their mount id.
Leaves to others: what to do about them. Needs root to see other users' processes; those it may not look at are left out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ciuic import mountinfo
from ciuic.long_names import Climber
from ciuic.mountinfo import Mount

UseKind = Literal["open", "mapping", "working directory", "root directory"]
OVERLAY_FS_TYPE = b"fuse.ciuic"
_TOO_LONG = b"(a path longer than can be shown)"
_MAX_USES = 64
"""That are kept of one process."""


class Use(NamedTuple):
    """One way in which a process holds on to something below the directory."""

    kind: UseKind
    path: bytes
    """As the process sees it; " (deleted)" follows the name of a removed file."""
    writes: bool
    """An open file or mapping that can be written through, or a directory that relative paths may start from."""
    known: bool = True
    """False: its path is longer than the kernel says, and it may as well lie beside the directory."""


class Bypasser(NamedTuple):
    """A process that goes round the overlay."""

    pid: int
    command: str
    uid: int
    uses: tuple[Use, ...]

    @property
    def writes(self) -> bool:
        """Whether it can change the backing directory through what it holds."""
        return any(use.writes for use in self.uses)

    @property
    def known(self) -> bool:
        """Whether it is known to do so."""
        return any(use.writes and use.known for use in self.uses)


class Location(NamedTuple):
    """A directory as a place in a file system, whatever it is called in a mount namespace."""

    device: tuple[int, int]
    path: bytes


def find_bypassing(
    root: Path | str | bytes,
    *,
    ignore_pids: Collection[int] = (),
    only_pids: Collection[int] | None = None,
    proc: Path = Path("/proc"),
) -> list[Bypasser]:
    """The processes that hold something at or below ``root``'s backing directory, in the order of their pids. The same before
    and after something is mounted over it: what was opened before has another mount id than what is opened through it.

    ``root`` is absolute; it may be covered by our overlay or not. ``ignore_pids`` are the caller's own (an overlay worker
    holds the backing directory by design); ``only_pids``: no others are looked at. Below a chroot, where /proc/self/mountinfo does not show the file system that
    the root lies on, nothing can be told of others, and nobody is found.
    """
    path = os.fsencode(root)
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    try:
        location = locate(path, mountinfo.read(proc / "self"))
    except ValueError:
        return []
    prefixes = _Prefixes(location)
    processes = sorted(int(name) for name in os.listdir(proc) if name.isdigit())
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


def locate(path: bytes, mounts: list[Mount]) -> Location:
    """Where ``path`` lies beneath any overlay of ours mounted on it."""
    best: Mount | None = None
    for mount in mounts:
        ours = mount.fs_type == OVERLAY_FS_TYPE and mount.mount_point == path
        if ours or not _is_below(path, mount.mount_point):
            continue
        if best is None or len(mount.mount_point) >= len(best.mount_point):
            best = mount  # of two on one mount point the later covers the earlier
    if best is None:
        raise ValueError(f"no mount contains {os.fsdecode(path)}")
    return Location(best.device, _join(best.root, path[len(best.mount_point.rstrip(b"/")) :]))


def name_inside(location: Location, mount: Mount) -> bytes | None:
    """What ``location`` is called through ``mount``; None if the mount does not show it.

    A mount of something below the location shows only what is below: its whole mount point is the answer.
    """
    if mount.device != location.device:
        return None
    if _is_below(location.path, mount.root):
        return _join(mount.mount_point, location.path[len(mount.root.rstrip(b"/")) :])
    if _is_below(mount.root, location.path):
        return mount.mount_point
    return None


class _Prefixes:
    """The names of one location, by mount namespace and by mount id (which is unique in the whole system)."""

    def __init__(self, location: Location) -> None:
        self.device = location.device
        self.by_mount: dict[int, bytes] = {}
        self._location = location
        self._by_namespace: dict[str, frozenset[bytes]] = {}

    def learn(self, process: Path) -> None:
        """Reads the mount table of the process's namespace, once for each namespace."""
        try:
            namespace = os.readlink(process / "ns/mnt")
            if namespace in self._by_namespace or os.readlink(process / "root") != "/":
                return  # a chrooted process sees only part of its namespace's mounts, under other names
            mounts = mountinfo.read(process)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return  # it has ended, or is another user's
        named = {mount.mount_id: name_inside(self._location, mount) for mount in mounts}
        known = {mount_id: name for mount_id, name in named.items() if name is not None}
        self.by_mount.update(known)
        self._by_namespace[namespace] = frozenset(known.values())

    def of(self, process: Path) -> frozenset[bytes]:
        return self._by_namespace.get(os.readlink(process / "ns/mnt"), frozenset())

    def covers(self, text: bytes) -> bool:
        """A cheap first question, for any namespace: whether the name could be below the location."""
        return any(_is_below(text, prefix) for prefix in self.by_mount.values())

    def covers_through(self, mount_id: int, text: bytes) -> bool:
        """The exact question: whether a name seen through that mount is at or below the location."""
        prefix = self.by_mount.get(mount_id)
        return prefix is not None and _is_below(text, prefix)


def _bounded(uses: Iterator[Use]) -> tuple[Use, ...]:
    """The first ones: a process may hold a million, and all that matters is whether it can write."""
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
        return  # it has ended meanwhile, or is another user's


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
    """What a link of /proc means for the location. ``text`` None: the kernel does not say where it leads."""
    if mount_id not in prefixes.by_mount:
        return  # of another file system, or through an overlay
    if text is None:
        text = climber.nearest_name(link)
        if text is None:
            if writes:
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
            writes = _can_write(int(facts["flags"], 8))
            link = process / "fd" / number
            yield from _use("open", text, int(facts["mnt_id"]), writes, link, prefixes, climber)
        except FileNotFoundError:
            continue  # closed meanwhile


def _link_or_none(link: Path) -> bytes | None:
    """What the link of /proc names; None where that exceeds PATH_MAX, which the kernel will not say."""
    try:
        return os.readlink(os.fsencode(link))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None


def _can_write(flags: int) -> bool:
    """A file open for writing; or a directory (O_PATH ones too), below which openat() can write."""
    return bool(flags & os.O_ACCMODE) or bool(flags & os.O_DIRECTORY)


def _mappings(process: Path, prefixes: _Prefixes) -> Iterator[Use]:
    """Shared writable mappings: they outlive the descriptor they were made from."""
    names = prefixes.of(process)
    if not names:
        return
    device = b"%02x:%02x" % prefixes.device
    for line in (process / "maps").read_bytes().splitlines():
        fields = line.split(None, 5)
        if len(fields) < 6 or fields[3] != device or fields[1][1:2] != b"w" or fields[1][3:4] != b"s":
            continue
        text = mountinfo.unescape(fields[5])
        if any(_is_below(text, name) for name in names):
            yield Use("mapping", text, writes=True)


def _fdinfo(path: Path) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {key: value.strip() for key, value in pairs}


def _mount_id_of_link(link: Path) -> int:
    """O_PATH resolves the kernel's link without asking the file system it leads to."""
    fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
    try:
        return int(_fdinfo(Path(f"/proc/self/fdinfo/{fd}"))["mnt_id"])
    finally:
        os.close(fd)


def _describe(process: Path, pid: int, uses: tuple[Use, ...]) -> Bypasser:
    try:
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        command = os.fsdecode(b" ".join(words)) or (process / "comm").read_text().strip()
        uid = process.stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        command, uid = "", -1
    return Bypasser(pid, command.encode("utf-8", "backslashreplace").decode(), uid, uses)


def _is_below(path: bytes, top: bytes) -> bool:
    """At or below, as paths, not as strings: /data2 is not below /data."""
    return top == b"/" or path == top or path.startswith(top + b"/")


def _join(top: bytes, rest: bytes) -> bytes:
    return (top.rstrip(b"/") + b"/" + rest.strip(b"/")).rstrip(b"/") or b"/"
