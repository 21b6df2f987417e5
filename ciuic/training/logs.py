"""Logger of the training library, and the barrier that keeps failures of saving from the training."""

from __future__ import annotations

import logging
from contextlib import suppress

from ciuic.printable import one_line

log = logging.getLogger("ciuic")


def _on_one_line(record: logging.LogRecord) -> bool:
    """Escape control characters: errors, names, and texts of other ranks and of remotes must not look like lines of their own."""
    # An object that cannot be shown must not end the training: what formats the record tells of it.
    with suppress(Exception):
        text = record.getMessage()
        if not text.isprintable():
            record.msg, record.args = one_line(text), ()
    return True


log.addFilter(_on_one_line)

_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, once in the life of the process."""
    if text not in _warned:
        _warned.add(text)
        log.warning("ciuic: %s", text)


class quietly:  # noqa: N801 (it reads as a word)
    """Context manager that logs and suppresses any Exception: saving must not end the training."""

    def __init__(self, what: str) -> None:
        """Remember what to log before the error."""
        self._what = what

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Suppress an Exception; KeyboardInterrupt and SystemExit pass."""
        # Not BaseException: KeyboardInterrupt, and SystemExit of preemption, must end the training.
        if isinstance(error, Exception):
            log.error("ciuic: %s: %s", self._what, error)
            return True
        return False
