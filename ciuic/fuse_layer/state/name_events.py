"""Counts of what happens to names that the daemon waits for, such as the rename that completes a checkpoint.

The daemon gives the patterns and takes the counts away every second. Nothing is counted, and a change of a name pays for one look at
an attribute, where it waits for none.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

Matcher = Callable[[bytes], Any]


class NameEvents:
    """Counts by rule. Called by the threads that serve the job: a count may be one too low, and is never 0 after an event.

    Args:
        rules: (What happens: ``renamed``, ``appears`` or ``closed``; shell pattern of the name).
    """

    def __init__(self, rules: Sequence[tuple[str, str]]) -> None:
        self.rules = tuple(rules)
        self._counts = [0] * len(rules)
        self._lost = [0] * len(rules)
        self._any = self._of(None)
        self._renamed = self._of("renamed")
        self._appears = self._of("appears")
        self._closed = self._of("closed")

    def _of(self, kind: str | None) -> list[tuple[int, Matcher]]:
        return [
            (number, re.compile(os.fsencode(fnmatch.translate(pattern))).match)
            for number, (wanted, pattern) in enumerate(self.rules)
            if kind in (wanted, None)
        ]

    def renamed(self, name: bytes) -> None:
        """Count a rename to this name."""
        self._count(self._renamed, name)
        self._count(self._appears, name)

    def appeared(self, name: bytes) -> None:
        """Count a new name."""
        self._count(self._appears, name)

    def closed(self, name: bytes) -> None:
        """Count the end of a handle that could write."""
        self._count(self._closed, name)

    def lost(self, name: bytes) -> None:
        """Count the removal of a file that was in no cut."""
        for number, matches in self._any:
            if matches(name):
                self._lost[number] += 1

    def _count(self, rules: list[tuple[int, Matcher]], name: bytes) -> None:
        for number, matches in rules:
            if matches(name):
                self._counts[number] += 1

    def take(self) -> tuple[list[int], list[int]]:
        """Return the counts of events and of lost files since the last call."""
        counts, self._counts = self._counts, [0] * len(self.rules)
        lost, self._lost = self._lost, [0] * len(self.rules)
        return counts, lost
