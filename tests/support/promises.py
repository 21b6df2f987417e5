"""Job that promises files: a file counts only when it and its directory were synced through the mount."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from pathlib import Path


class PromisingJob(threading.Thread):
    """Write files, sync them and their directory, and only then record them as promised.

    The job continues through errors, such as those of a killed worker; a failed operation has promised
    nothing. A context manager: the job runs inside.
    """

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(name="promising job")
        self._root, self._rng = root, random.Random(seed)
        self._over, self._lock, self._quiet = threading.Event(), threading.Lock(), threading.Lock()
        self._made: dict[str, str] = {}
        self.errors = 0

    def __enter__(self) -> PromisingJob:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()

    def made(self) -> dict[str, str]:
        """Return every promise so far: name below the root → SHA-256."""
        with self._lock:
            return dict(self._made)

    def paused(self) -> threading.Lock:
        """Pause the job for the block."""
        return self._quiet

    def run(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                with self._quiet:
                    self._promise(f"d{number % 7}", f"p{number}")
            except OSError:
                self.errors += 1
                # A job is not told when its mount is back.
                time.sleep(0.02)

    def _promise(self, folder: str, name: str) -> None:
        data = self._rng.randbytes(self._rng.choice((100, 5_000, 300_000)))
        where = self._root / folder
        if not where.is_dir():
            where.mkdir(exist_ok=True)
            _sync(self._root)
        with open(where / f".{name}.tmp", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(where / f".{name}.tmp", where / name)
        _sync(where)
        with self._lock:
            self._made[f"{folder}/{name}"] = hashlib.sha256(data).hexdigest()
        # A file that changes in place and promises nothing.
        with open(self._root / "log", "a") as log:
            log.write(f"{name}\n")


def broken(promises: dict[str, str], top: Path) -> list[str]:
    """Return the promises that are broken below ``top``, one sentence each."""
    failures = []
    for name, digest in promises.items():
        try:
            if hashlib.sha256((top / name).read_bytes()).hexdigest() != digest:
                failures.append(f"{name} was synced and has another content")
        except OSError as error:
            failures.append(f"{name} was synced and cannot be read: {error.strerror}")
    return failures


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
