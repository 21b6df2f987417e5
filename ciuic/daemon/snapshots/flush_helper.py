"""Have the kernel write back what it caches for one mount. Run as a script; imports no other module of ciuic.

Standard input: names relative to the mount, separated by NUL. Argument: the root. Exit status 0 when
everything written to those files before the start has reached the overlay worker, 3 when a name was no longer
there (renamed meanwhile: ask again).

A process of its own, because opening and closing files through a mount waits for its worker, uninterruptibly
where the worker hangs: then this process hangs, and not the daemon. syncfs(2) on FUSE starts the write-back
and does not wait for it (measured on Linux 6.18); close(2) waits for the file that it closes. So syncfs
starts the write-back of all files, and each close waits for one of them.
"""

import ctypes
import os
import sys

VANISHED = 3
# O_NONBLOCK: a fifo that took a file's name must not block the open. O_NOFOLLOW: a symlink must not lead out
# of the root.
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def main() -> None:
    """Flush the files that standard input names, and exit."""
    names = [name for name in sys.stdin.buffer.read().split(b"\0") if name]
    root = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # The os module has no syncfs(2). Its result does not matter: each close below waits for its file.
    ctypes.CDLL(None).syncfs(root)
    vanished = False
    for name in names:
        try:
            fd = os.open(name, FLAGS, dir_fd=root)
        # Most likely it was renamed: the daemon asks for the names again, for some rounds.
        except OSError:
            vanished = True
            continue
        os.close(fd)
    sys.exit(VANISHED if vanished else 0)


if __name__ == "__main__":
    main()
