"""Check of files that are in place already with content that was not read (``--check=after``).

Guarantees: each file is read back and compared with its chunks' ids. One that differs, and that no program has changed since, is
renamed to ``NAME.ciuic-damaged-…`` under all names that the restore gave it, durably, and recorded; none is left under its name
unless the rename fails, which is recorded as well. A file that a program has changed since is judged by what the packs have: it
stays if they are whole. What was removed or replaced since is left alone. Names are followed from the destination without symbolic links.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.repository.pack_format import CODED_FLAGS
from ciuic.restore.content import Batch, BlockWorker, batches
from ciuic.restore.destination import lift_mode, open_below, refusal, rename_new, stat_at
from ciuic.restore.new_files import READ_FILE
from ciuic.restore.outcomes import Outcomes, OwedCheck
from ciuic.restore.pool import Pool
from ciuic.types import recorded_time

_SUFFIX: Final = b".ciuic-damaged-"
_MAX_NAME_BYTES: Final = 255

Base = tuple[bytes, int]
"""Path of a directory above what was restored, and its descriptor."""


class _Check:
    """A file being read back. `outstanding` is guarded by ``Pool.changed``."""

    def __init__(self, owed: OwedCheck, fd: int) -> None:
        self.owed = owed
        self.fd = fd
        self.outstanding = 1
        """Batches in work, and one for the thread that is still feeding."""
        self.differs = False
        self.stopped = False


class DeferredCheck:
    """Reads files back in the order of their first place in the packs. Its public methods are for the walk's thread."""

    def __init__(self, repository: Repository, pool: Pool, outcomes: Outcomes, bases: Sequence[Base]) -> None:
        self._repository = repository
        self._pool = pool
        self._outcomes = outcomes
        # The longest first: of several above a file it is the nearest.
        self._bases = sorted(bases, key=lambda base: -len(base[0]))
        # Renames and modes of directories: one at a time, and seldom.
        self._renaming = threading.Lock()

    def run(self) -> None:
        """Check all files that are owed; return when all are judged, or the run is stopped."""
        for owed in sorted(self._outcomes.owed.values(), key=lambda owed: owed.unread_from):
            if self._pool.stopping:
                return
            self._feed(owed)
        self._pool.wait(self._pool.idle)

    def _feed(self, owed: OwedCheck) -> None:
        fd = self._open(owed)
        if fd < 0:
            return
        check = _Check(owed, fd)
        try:
            for batch in batches(self._repository, owed.entry):
                if check.differs or self._pool.stopping:
                    break
                with self._pool.changed:
                    check.outstanding += 1
                try:
                    self._pool.submit(partial(self._batch, check, batch))
                except BaseException:
                    with self._pool.changed:
                        check.outstanding -= 1
                    raise
        except Damaged:
            check.differs = True
        except BaseException:
            check.stopped = True
            self._end_batch(check, lambda: None)
            raise
        check.stopped = check.stopped or self._pool.stopping
        # Judged by a thread of the pool, which has a repository of its own.
        self._pool.submit(lambda worker: self._end_batch(check, partial(self._judge, check, worker)))

    def _open(self, owed: OwedCheck) -> int:
        """Open the file by any of its names; -1 if it is under none of them any more, or cannot be read, which is recorded."""
        for path in owed.paths:
            try:
                folder, name = self._folder_of(path)
                try:
                    fd = os.open(name, READ_FILE, dir_fd=folder)
                finally:
                    os.close(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._outcomes.failed(path, f"its content could not be checked: {refusal(error)}")
                return -1
            st = os.fstat(fd)
            if (st.st_dev, st.st_ino) == owed.inode:
                return fd
            os.close(fd)
        return -1

    def _folder_of(self, path: bytes) -> tuple[int, bytes]:
        """Return a descriptor of the file's directory, and its name there. OSError."""
        above, base = next(base for base in self._bases if path.startswith(base[0].rstrip(b"/") + b"/"))
        *names, name = path[len(above.rstrip(b"/")) + 1 :].split(b"/")
        return open_below(base, names), name

    def _batch(self, check: _Check, batch: Batch, worker: BlockWorker) -> None:
        try:
            worker.check()
            if not check.differs and not worker.equal(check.fd, check.owed.entry, batch, patient=True):
                check.differs = True
        except OSError:
            # A sector that cannot be read is as wrong as one that reads wrong.
            check.differs = True
        except BaseException:
            check.stopped = True
            raise
        finally:
            self._end_batch(check, partial(self._judge, check, worker))

    def _end_batch(self, check: _Check, judge: Callable[[], None]) -> None:
        with self._pool.changed:
            check.outstanding -= 1
            if check.outstanding:
                return
        try:
            if not check.stopped:
                judge()
        finally:
            os.close(check.fd)

    def _judge(self, check: _Check, worker: BlockWorker) -> None:
        if check.differs and not self._was_changed(check, worker):
            for path in check.owed.paths:
                self._put_aside(check.owed, path)
        self._outcomes.checked()

    def _was_changed(self, check: _Check, worker: BlockWorker) -> bool:
        """Return whether a program has changed the file since, and the packs have what it was made from."""
        entry, now = check.owed.entry, os.fstat(check.fd)
        # A store through a mapping moves the time before it lands, so this is asked after the difference was seen.
        if now.st_size == entry.size_bytes and recorded_time(now.st_mtime_ns) == entry.mtime_ns:
            return False
        try:
            return all(
                self._packs_have(worker.repository, batch) for batch in batches(worker.repository, entry)
            )
        except (OSError, Damaged):
            return False

    def _packs_have(self, repository: Repository, batch: Batch) -> bool:
        chunks = [chunk for _, chunk in batch.blocks]
        found = repository.bulk.locate(chunks)
        for piece in repository.bulk.read(chunks):
            self._pool.check()
            location = found.get(chunks[piece.position])
            # Coded content was checked before it was written.
            if piece.source is None and (location is None or not location.flags & CODED_FLAGS):
                return False
        return True

    def _put_aside(self, owed: OwedCheck, path: bytes) -> None:
        directory = path[: path.rindex(b"/") + 1]
        reason = "it was in place, and its content does not match its checksums"
        try:
            folder, name = self._folder_of(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._outcomes.put_aside(path, b"", f"{reason}; it could not be renamed: {refusal(error)}")
            return
        try:
            with self._renaming:
                st = stat_at(folder, name)
                if st is None or (st.st_dev, st.st_ino) != owed.inode:
                    return
                mode = lift_mode(folder)
                try:
                    # With random digits: an earlier run may have put one aside as well.
                    suffix = _SUFFIX + os.urandom(4).hex().encode("ascii")
                    aside = name[: _MAX_NAME_BYTES - len(suffix)] + suffix
                    rename_new(folder, name, folder, aside)
                finally:
                    if mode is not None:
                        os.chmod(folder, mode)
                # Durable: after a power cut the wrong file must not have its name again.
                os.fsync(folder)
        except OSError as error:
            self._outcomes.put_aside(path, b"", f"{reason}; it could not be renamed: {refusal(error)}")
            return
        finally:
            os.close(folder)
        self._outcomes.put_aside(path, directory + aside, f"{reason}; it is named {os.fsdecode(aside)} now")
