"""Chains of directories deeper than any path reaches, made, compared and removed by relative walking."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def make_chain(top: Path, levels: int, name: bytes, *, files: int = 0) -> None:
    """Make ``levels`` nested directories of this name, with ``files`` small files in each."""
    fd = os.open(top, _OPEN)
    for level in range(levels):
        for number in range(files):
            file = os.open(b"a%d" % number, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd)
            os.write(file, b"%d %d" % (level, number))
            os.close(file)
        os.mkdir(name, dir_fd=fd)
        fd = _down(fd, name)
    os.close(fd)


def levels_below(top: Path, name: bytes) -> int:
    """Return how many directories of this name are nested."""
    fd, levels = os.open(top, _OPEN), 0
    while True:
        try:
            fd = _down(fd, name)
        except FileNotFoundError:
            os.close(fd)
            return levels
        levels += 1


def contents(top: Path, name: bytes) -> Iterator[dict[str, bytes]]:
    """Return the files of each directory of the chain, from the top down."""
    fd = os.open(top, _OPEN)
    try:
        while True:
            found = {}
            for file in os.listdir(fd):
                if os.fsencode(file) != name:
                    opened = os.open(file, os.O_RDONLY, dir_fd=fd)
                    found[file] = os.read(opened, 1000)
                    os.close(opened)
            yield found
            below = os.open(name, _OPEN, dir_fd=fd)
            os.close(fd)
            fd = below
    except FileNotFoundError:
        return
    finally:
        os.close(fd)


def remove_chain(top: Path, name: bytes) -> None:
    """Remove the whole chain, moving every directory to the top first, so that nothing is deep."""
    fd = os.open(top, _OPEN)
    try:
        while True:
            try:
                first = os.open(name, _OPEN, dir_fd=fd)
            except FileNotFoundError:
                return
            moved = _move_up(name, first, fd)
            for file in os.listdir(first):
                os.unlink(file, dir_fd=first)
            os.close(first)
            os.rmdir(name, dir_fd=fd)
            if moved:
                os.rename(b".next", name, src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        os.close(fd)


def _move_up(name: bytes, source: int, target: int) -> bool:
    try:
        os.rename(name, b".next", src_dir_fd=source, dst_dir_fd=target)
    except FileNotFoundError:
        return False
    return True


def _down(fd: int, name: bytes) -> int:
    below = os.open(name, _OPEN, dir_fd=fd)
    os.close(fd)
    return below
