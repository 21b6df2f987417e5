"""Random operations on a directory, the same for the same seed, and what each of them returned: one line an operation.

python lazy_ops.py DIRECTORY SEED COUNT
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import sys
from collections.abc import Callable


class Actor:
    """Carries out operations in a directory."""

    def __init__(self, top: str, seed: int) -> None:
        self.top = top
        self.rng = random.Random(seed)
        self.made = 0

    def names(self) -> list[str]:
        """Return all regular files, sorted, relative to the directory."""
        found = []
        for folder, _, files in os.walk(self.top):
            for name in files:
                path = os.path.join(folder, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    found.append(os.path.relpath(path, self.top))
        return sorted(found)

    def step(self) -> str:
        """Carry out one operation; return its name and result."""
        names = self.names()
        act: Callable[[str], object] = self.rng.choice(
            [
                *(self.read, self.read, self.read, self.read_range, self.read_range, self.mapped, self.facts),
                *(self.append, self.overwrite, self.cut, self.empty, self.replace, self.create, self.copy),
                *(self.unlink, self.rename, self.link, self.chmod, self.touch, self.read_removed, self.holes),
            ]
        )
        if not names:
            act = self.create
        name = self.rng.choice(names) if names else ""
        try:
            result = act(os.path.join(self.top, name))
        except OSError as error:
            result = f"errno {error.errno}"
        return f"{act.__name__} {name} {result}"

    def new(self) -> str:
        """Return a name that nothing has."""
        self.made += 1
        return os.path.join(self.top, f"new{self.made}")

    def read(self, path: str) -> str:
        """Read all."""
        with open(path, "rb") as file:
            return digest(file.read())

    def read_range(self, path: str) -> str:
        """Read a part."""
        size = os.path.getsize(path)
        at, length = self.rng.randrange(size + 1), self.rng.randrange(1, 20000)
        with open(path, "rb", buffering=0) as file:
            file.seek(at)
            return digest(file.read(length))

    def mapped(self, path: str) -> str:
        """Read through a mapping."""
        at = self.rng.random()
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return "empty"
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                start = int(at * len(view))
                return digest(view[start : start + 9000])

    def read_removed(self, path: str) -> str:
        """Read a file after its name is gone."""
        with open(path, "rb") as file:
            os.unlink(path)
            return digest(file.read())

    def facts(self, path: str) -> str:
        """Look at the attributes."""
        st = os.stat(path)
        return f"{st.st_size} {st.st_nlink} {st.st_mode:o} {st.st_uid}"

    def holes(self, path: str) -> str:
        """Collect what lies in the extents of data: what counts as a hole must be zeros."""
        pieces, at = bytearray(os.path.getsize(path)), 0
        fd = os.open(path, os.O_RDONLY)
        try:
            while at < len(pieces):
                try:
                    start = os.lseek(fd, at, os.SEEK_DATA)
                except OSError:
                    break
                at = os.lseek(fd, start, os.SEEK_HOLE)
                pieces[start:at] = os.pread(fd, at - start, start)
        finally:
            os.close(fd)
        return digest(bytes(pieces))

    def append(self, path: str) -> str:
        """Append a line."""
        with open(path, "ab") as file:
            file.write(b"appended %d\n" % self.rng.randrange(1000))
        return str(os.path.getsize(path))

    def overwrite(self, path: str) -> str:
        """Write in the middle."""
        at, data = self.rng.random(), self.rng.randbytes(self.rng.randrange(1, 9000))
        with open(path, "r+b") as file:
            file.seek(int(at * os.fstat(file.fileno()).st_size))
            file.write(data)
            if self.rng.random() < 0.3:
                os.fsync(file.fileno())
        return self.read(path)

    def cut(self, path: str) -> str:
        """Truncate to any length, which may be longer."""
        os.truncate(path, int(self.rng.random() * 1.5 * os.path.getsize(path)))
        return self.read(path)

    def empty(self, path: str) -> str:
        """Truncate to nothing."""
        os.truncate(path, 0)
        return self.facts(path)

    def replace(self, path: str) -> str:
        """Write anew."""
        with open(path, "wb") as file:
            file.write(self.rng.randbytes(self.rng.randrange(20000)))
        return self.read(path)

    def create(self, path: str) -> str:
        """Make a file."""
        return self.replace(self.new())

    def copy(self, path: str) -> str:
        """Copy a file in the kernel."""
        new = self.new()
        with open(path, "rb") as source, open(new, "wb") as target:
            left = os.fstat(source.fileno()).st_size
            while left > 0 and (done := os.copy_file_range(source.fileno(), target.fileno(), left)):
                left -= done
        return self.read(new)

    def unlink(self, path: str) -> str:
        """Remove a name."""
        os.unlink(path)
        return ""

    def rename(self, path: str) -> str:
        """Rename to a new name, or over another file."""
        target = self.rng.choice([self.new(), os.path.join(self.top, self.rng.choice(self.names()))])
        os.rename(path, target)
        return self.facts(target)

    def link(self, path: str) -> str:
        """Make another name."""
        os.link(path, self.new())
        return self.facts(path)

    def chmod(self, path: str) -> str:
        """Change the mode."""
        os.chmod(path, self.rng.choice([0o600, 0o644, 0o751]))
        return self.facts(path)

    def touch(self, path: str) -> str:
        """Set the time of a file."""
        os.utime(path, (1, self.rng.randrange(10**9)))
        return str(os.stat(path).st_mtime_ns)


def digest(data: bytes) -> str:
    """Return length and digest of bytes."""
    return f"{len(data)} {hashlib.sha256(data).hexdigest()[:16]}"


def main() -> None:
    """Carry out the operations."""
    actor = Actor(sys.argv[1], int(sys.argv[2]))
    for _ in range(int(sys.argv[3])):
        sys.stdout.write(actor.step() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
