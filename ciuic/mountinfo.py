"""/proc/<pid>/mountinfo as values. Pure parsing; never touches a mounted file system, so that a dead mount cannot block it.

Paths are bytes with the kernel's octal escapes undone. See proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of mountinfo."""

    mount_id: int
    parent_id: int
    device: tuple[int, int]
    """major, minor of the superblock (on btrfs not what st_dev says)."""
    root: bytes
    """Which directory of the file system is mounted."""
    mount_point: bytes
    """Where, relative to the reading process's root directory."""
    options: bytes
    fs_type: bytes
    source: bytes
    super_options: bytes


def unescape(text: bytes) -> bytes:
    r"""Undoes ``\040`` and its like (space, tab, newline, backslash, hash)."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), text)


def parse(text: bytes) -> list[Mount]:
    """The mounts in the order of the file: of several on one mount point the last is the topmost."""
    return [_parse_line(line) for line in text.splitlines() if line]


def _parse_line(line: bytes) -> Mount:
    fields = line.split(b" ")
    dash = fields.index(b"-", 6)  # any number of optional fields stand before it
    major, minor = fields[2].split(b":")
    return Mount(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        device=(int(major), int(minor)),
        root=unescape(fields[3]),
        mount_point=unescape(fields[4]),
        options=fields[5],
        fs_type=unescape(fields[dash + 1]),
        source=unescape(fields[dash + 2]) if len(fields) > dash + 2 else b"",
        super_options=fields[dash + 3] if len(fields) > dash + 3 else b"",
    )


def read(process: Path = Path("/proc/self")) -> list[Mount]:
    """The mounts that ``process`` sees. FileNotFoundError or ProcessLookupError when it has gone."""
    return parse((process / "mountinfo").read_bytes())


def is_served_by_a_user(fs_type: bytes, super_options: bytes) -> bool:
    """Whether a process of an ordinary user answers for a file system (fusermount3(1)): it may never answer, and decides what root
    sees there."""
    if not fs_type.startswith(b"fuse"):
        return False
    options = dict(option.partition(b"=")[::2] for option in super_options.split(b","))
    return options.get(b"user_id", b"0") not in (b"0", b"%d" % os.geteuid())


def mounts_at(path: bytes, mounts: list[Mount]) -> list[Mount]:
    """What is mounted exactly on ``path``, bottom first."""
    return [mount for mount in mounts if mount.mount_point == path]
