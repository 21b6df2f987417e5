"""A process that makes the kernel write back what it caches for one mount: run as a script, imports nothing of ours.

Standard input: names relative to the mount, separated by NUL. Argument: the root. Exit 0 when everything written to those
files before the start has reached the overlay worker, 3 when a name was no longer there (renamed meanwhile: ask again).

A process of its own, because opening and closing files through a mount waits for its worker, uninterruptibly where that
hangs: then this process hangs, and not the daemon. syncfs(2) on FUSE starts the write-back and does not wait for it
(measured on 6.18); close(2) waits for the file it closes. So: start everything, then close file by file.
"""

import ctypes
import os
import sys

VANISHED = 3
# NONBLOCK: a fifo that took a file's name must not stop us; NOFOLLOW: a symlink must not lead us out of the root.
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def main() -> None:
    names = [name for name in sys.stdin.buffer.read().split(b"\0") if name]
    root = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    ctypes.CDLL(None).syncfs(root)
    vanished = False
    for name in names:
        try:
            fd = os.open(name, FLAGS, dir_fd=root)
        except OSError:
            vanished = True
            continue
        os.close(fd)
    sys.exit(VANISHED if vanished else 0)


if __name__ == "__main__":
    main()
