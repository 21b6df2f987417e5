"""Choice among the names below a target of a restore: patterns to include and to exclude, by the rules of gitignore (`ciuic.excludes`).

A pattern without a slash matches at any depth, one with a slash is relative to the target, and so is one that begins with a slash, as
in git; only one that begins with the target's own path spells an absolute path. What is included comes with everything below it, and with the directories that lead to it; what is
excluded is left alone, with everything below it, also where it is included.

Guarantees: what is left out of a restore is neither written nor removed, and the attributes of an existing directory that only
leads to what is included stay as they are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

from ciuic.errors import Damaged
from ciuic.excludes import ExcludeMatcher, effective_patterns
from ciuic.repository import Repository
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.lookup import Located, join
from ciuic.types import FLAG_MOUNTPOINT, Entry


class Selection:
    """Choice among what lies at or below one target; paths are those at the snapshot."""

    def __init__(
        self, repository: Repository, source: Located, include: Sequence[str], exclude: Sequence[str]
    ) -> None:
        """Find the directories that lead to what is included.

        Args:
            repository: Repository of the snapshot.
            source: The target. A target that is no directory is restored whatever the patterns say.
            include: Patterns of what is restored; none: everything.
            exclude: Patterns of what is not.

        Raises:
            ValueError: a pattern cannot match anything; the message names it.
        """
        self._top = source.path
        self._start = len(source.path.rstrip(b"/")) + 1
        top = os.fsdecode(source.path)
        self._include = ExcludeMatcher(source.path, effective_patterns(top, (), include)) if include else None
        self._exclude = ExcludeMatcher(source.path, effective_patterns(top, (), exclude))
        self.digest = hashlib.sha256(
            repr((tuple(include), tuple(exclude))).encode(errors="surrogateescape")
        ).digest()
        """Tells one choice from another in the journal of a restore."""
        self._leading: set[bytes] = set()
        if self._include is not None and source.entry.is_dir:
            self._find_leading(repository, source)

    @property
    def is_empty(self) -> bool:
        """True if there are patterns of what to include, and nothing below the target matches."""
        return self._include is not None and not self._leading

    def has(self, path: bytes, is_dir: bool) -> bool:
        """Return whether the name is restored, a directory perhaps only because it leads to what is."""
        return self._is_chosen(path, is_dir) or (is_dir and path in self._leading)

    def only_leads(self, path: bytes) -> bool:
        """Return whether a directory is there only for what is below it."""
        return path in self._leading and not self._is_chosen(path, is_dir=True)

    def spares(self, path: bytes, is_dir: bool) -> bool:
        """Return whether ``delete`` must leave alone what exists at this path, with everything below."""
        if is_dir:
            return self._exclude.match(path[self._start :], is_dir=True)
        return not self._is_chosen(path, is_dir)

    def spares_directory(self, path: bytes) -> bool:
        """Return whether ``delete`` must leave a directory, but not what is chosen below it."""
        return not self._is_chosen(path, is_dir=True)

    def _is_chosen(self, path: bytes, is_dir: bool) -> bool:
        below = path[self._start :]
        if self._exclude.match(below, is_dir):
            return False
        # The top itself: all of it, or what is included in it.
        return self._include is None or self._include.match(below, is_dir)

    def _find_leading(self, repository: Repository, source: Located) -> None:
        assert self._include is not None
        lineage = Lineage()
        lineage.enter(b"")
        # (path, entries); all paths on the stack lead to what is found in the last one.
        stack: list[tuple[bytes, Iterator[Entry]]] = [
            (source.path, repository.trees.entries(source.entry.content))
        ]
        while stack:
            path, entries = stack[-1]
            try:
                entry = next(entries, None)
            except Damaged:
                # Told by the restore, which looks into each directory that may have something for it.
                self._lead(stack)
                entry = None
            if entry is None:
                stack.pop()
                lineage.leave()
                continue
            here = join(path, entry.name)
            below = here[self._start :]
            if self._exclude.match(below, entry.is_dir):
                continue
            if self._include.match(below, entry.is_dir):
                self._lead(stack)
            elif entry.is_dir and entry.content and not entry.flags & FLAG_MOUNTPOINT:
                lineage.enter(entry.content)
                stack.append((here, repository.trees.entries(entry.content)))

    def _lead(self, stack: list[tuple[bytes, Iterator[Entry]]]) -> None:
        for path, _ in reversed(stack):
            if path in self._leading:
                return
            self._leading.add(path)
