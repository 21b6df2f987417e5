"""``ciuic verify --checksum --max-duration``: a scrub in slices, for a timer.

Guarantees: the next run goes on where this one stopped, however it ended; it makes way for whoever waits for the disk
(ciuic.system.io_throttle); exit 4 exactly when this slice found damage, so that a timer's unit fails on the day it is found.
"""

from __future__ import annotations

import time
from typing import Any

from ciuic.cli.shared import times
from ciuic.cli.shared.output import out, out_json
from ciuic.cli.shared.session import Session
from ciuic.cli.shared.verify_result import as_document, print_damages, reporting
from ciuic.errors import Damaged
from ciuic.maintenance.verify import Pass, ScrubBook, VerifyResult, verify_slice
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files
from ciuic.units import human_size


def verify_for(session: Session, seconds: float, *, restart: bool, as_json: bool) -> int:
    """Verify one slice and return the exit code."""
    deadline = time.monotonic() + seconds
    # Where it stopped is noted there.
    repository = session.own_repository
    pace = Pace(
        gauges(waits_files(str(session.config.runtime_dir))),
        min_share=session.config.capture.min_share,
        processor_waits=processor_waits(),
    )
    with ScrubBook(session.repository_dir, repository.id) as book, reporting() as report:
        if restart:
            # 0: no pass has begun, so that this slice begins one.
            book.state.began_ns = 0
        result = verify_slice(
            repository,
            book,
            time_is_up=lambda: time.monotonic() >= deadline,
            between=pace.step,
            progress=report,
        )
        state = book.state
        book.save()
    stored = repository.stored_bytes()
    if as_json:
        out_json({**as_document(result), "scrub": _document(state, stored)})
    else:
        _print(result, state, stored)
    return Damaged.exit_code if result.damaged else 0


def _document(state: Pass, stored_bytes: int) -> dict[str, Any]:
    return {
        "complete": not state.began_ns,
        "bytes_done": state.bytes_read,
        # A prune during the pass may have left fewer bytes than were read.
        "bytes_total": max(stored_bytes, state.bytes_read),
        "damages": state.damages,
    }


def _print(result: VerifyResult, state: Pass, stored_bytes: int) -> None:
    print_damages(result)
    verdict = f"{len(result.damages)} damaged" if result.damaged else "every byte that was read is right"
    colour = "red" if result.damaged else "green"
    if not state.began_ns:
        out(f"{verdict}; that completes a pass over {human_size(state.bytes_read)}", fg=colour)
        return
    share = state.bytes_read / max(stored_bytes, state.bytes_read, 1)
    out(
        f"{verdict}; {share:.0%} of {human_size(stored_bytes)} since {times.clock(state.began_ns)}, "
        "the next run goes on there",
        fg=colour,
    )
