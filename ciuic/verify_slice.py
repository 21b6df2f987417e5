"""A verification of everything, in slices: each goes on where the one before it stopped.

Guarantees: what was found is told before the book says that it was looked at, so a slice that is killed hides no damage. A
slice ends with the pack or the snapshot that it is at when its time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ciuic.repository import Repository
from ciuic.scrub_book import ScrubBook
from ciuic.types import SnapshotId
from ciuic.verify import Verification, VerifyProgress, VerifyResult


def verify_slice(
    repository: Repository,
    book: ScrubBook,
    *,
    time_is_up: Callable[[], bool],
    between: Callable[[], None] = lambda: None,
    progress: Callable[[VerifyProgress], None] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> VerifyResult:
    """Goes on with the pass in ``book``, or begins one, until its end or ``time_is_up``; that is asked after each pack and
    each snapshot. ``between`` is called often, for whoever wants to pause.

    A whole pass is what `verify_snapshots` does with all snapshots and ``checksum``; `book.state` says how far it is.
    """
    return _Slice(repository, True, progress, between).go_on(book, time_is_up, now_ns)


class _Slice(Verification):
    """See verify_slice."""

    def go_on(
        self, book: ScrubBook, time_is_up: Callable[[], bool], now_ns: Callable[[], int]
    ) -> VerifyResult:
        if not book.state.began_ns:
            book.begin(now_ns())
            self._look_at_own_files()
        state, over = book.state, False

        def noted() -> bool:
            """Notes how far it is: not beyond damage that nobody has been told of, or a kill would hide it."""
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
        self._scrub(after=state.last_pack, goes_on=pack_done)
        if not over:
            known = set(state.checked)
            left = [id_ for id_ in self.repository.snapshots.ids() if str(id_) not in known]
            self._look_at(self._load(left), read=False, goes_on=snapshot_done)
        self._name_the_damaged()
        state.damages += len(self.result.damages)
        if not over:
            book.complete(now_ns())
        self._tell(b"")
        return self.result
