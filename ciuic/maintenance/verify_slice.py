"""Verify everything in slices, each of which continues where the one before it stopped.

Guarantees: damage is reported before the state file counts its pack or snapshot as verified, so a slice that is killed hides
none. When its time is up, a slice ends after the pack or snapshot that it is reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ciuic.maintenance.scrub_state import ScrubBook
from ciuic.maintenance.verify import Verification, VerifyProgress, VerifyResult
from ciuic.repository import Repository
from ciuic.types import SnapshotId


def verify_slice(
    repository: Repository,
    book: ScrubBook,
    *,
    time_is_up: Callable[[], bool],
    between: Callable[[], None] = lambda: None,
    progress: Callable[[VerifyProgress], None] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> VerifyResult:
    """Continue the pass in ``book``, or begin one; a whole pass equals `verify_snapshots` of all snapshots with ``checksum``.

    Args:
        repository: the open repository.
        book: the locked state; `book.state` has the progress afterwards.
        time_is_up: called after each pack and each snapshot; True ends the slice.
        between: called often, so that the caller can pause.
        progress: called with the progress.
        now_ns: wall clock.
    """
    return _Slice(repository, True, progress, between).go_on(book, time_is_up, now_ns)


class _Slice(Verification):
    """Verification that notes its progress in the state file."""

    def go_on(
        self, book: ScrubBook, time_is_up: Callable[[], bool], now_ns: Callable[[], int]
    ) -> VerifyResult:
        """Verify until the pass ends or the time is up; see `verify_slice`."""
        if not book.state.began_ns:
            book.begin(now_ns())
            self._verify_repository_files()
        state, over = book.state, False

        def noted() -> bool:
            """Note the progress, but not beyond damage that was not reported yet: a kill would hide it."""
            nonlocal over
            if not self._bad and not self.result.damages:
                book.save()
            over = time_is_up()
            return not over

        def pack_done(number: int) -> bool:
            state.last_pack = number
            state.bytes_read = read_before + self.result.bytes_read
            return noted()

        def snapshot_done(id_: SnapshotId) -> bool:
            state.checked.append(str(id_))
            return noted()

        read_before = state.bytes_read
        # Packs first, in the order of their numbers: those that are added meanwhile have higher ones and come last.
        self._scrub(after=state.last_pack, goes_on=pack_done)
        if not over:
            # Content was read with the packs, so snapshots need no second read: only lookups.
            known = set(state.checked)
            left = [id_ for id_ in self.repository.snapshots.ids() if str(id_) not in known]
            self._verify_snapshots(self._load(left), read=False, goes_on=snapshot_done)
        self._report_damage()
        state.damages += len(self.result.damages)
        if not over:
            book.complete(now_ns())
        self._show_progress(b"")
        return self.result
