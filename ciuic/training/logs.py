"""The library's logger, and how what goes wrong with saving is kept from the training."""

from __future__ import annotations

import logging

log = logging.getLogger("ciuic")


_said: set[str] = set()


def warn_once(text: str) -> None:
    """In the life of the process."""
    if text not in _said:
        _said.add(text)
        log.warning("ciuic: %s", text)


class quietly:  # noqa: N801 (it reads as a word)
    """Saving must not end the training: whatever happens inside is logged."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            log.error("ciuic: %s: %s", self._what, error)
            return True
        return False
