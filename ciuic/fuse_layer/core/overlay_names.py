"""Operations on names in the tracked overlay: what `OverlayNames` does on the hooks of names.py.

Guarantees: a free name that is made, and all that a change of names moves, is saved before where a sealed epoch needs it (the hooks of
the state), and marked after it, inside the same stay in the gate. Files that come and go within an epoch leave no mark.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ciuic.fuse_layer.core.names import Names, Target
from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.system.path_handles import PathHandle
from ciuic.fuse_layer.tracking.changes import ABSENT


class OverlayNames(Names):
    """Operations of one overlay on names: bindings are saved for sealed epochs, and marked."""

    _state: OverlayState

    def __init__(self, state: OverlayState, *, after_freeing: Callable[[], None] = lambda: None) -> None:
        """Work on this state.

        Args:
            state: state of the overlay.
            after_freeing: called inside the gate, after a removal that would have freed much space if the undo
                log had not kept it.
        """
        super().__init__(state)
        self._after_freeing = after_freeing

    def _before_making(self, parent: Node, entry: PathHandle) -> None:
        # Where the name is taken nothing will change: EEXIST.
        if _lstat_or_none(entry) is None:
            self._state.keep_name(parent, entry, None)

    def _is_new(self, parent: Node, entry: PathHandle) -> bool:
        # The kernel creates names that it believes to be free. Whether it is right matters before the
        # creation only where the binding has to be saved: one system call less otherwise.
        if not self._state.undo.active:
            return True
        if _lstat_or_none(entry) is not None:
            return False
        self._state.keep_name(parent, entry, None)
        return True

    def _made(self, parent: Node, name: bytes, node: Node) -> None:
        if self._state.tracked(parent):
            self._state.tracker.mark_created(parent, name, node.ino)

    def _linked(self, node: Node, parent: Node, name: bytes, *, nameless: bool) -> None:
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        if nameless:
            # It is in no snapshot yet.
            tracker.mark_created(parent, name, node.ino)
        else:
            tracker.mark_name(parent, name, ABSENT)
        # One name becomes several: each entry in the snapshot changes its form.
        for known_parent, known_name in node.names():
            tracker.mark_touched(known_parent, known_name)
        tracker.mark_attrs(node)

    def _removed(self, parent: Node, name: bytes, target: Target) -> None:
        if self._state.tracked(parent):
            self._state.tracker.mark_removed(parent, name, target.st.st_ino)

    def _lost_name(self, target: Target, *, gone: bool) -> None:
        if target.frees_much:
            self._after_freeing()
        if target.st.st_dev != self._nodes.device:
            return
        tracker = self._state.tracker
        # Temporary files that come and go within an epoch leave no trace.
        if gone and tracker.is_fresh(target.st.st_ino):
            tracker.forget_created(target.st.st_ino)
            return
        if target.node is not None:
            # Of several names one may remain: its entry in the snapshot changes its form.
            for known_parent, known_name in target.node.names():
                tracker.mark_touched(known_parent, known_name)
        self._mark_touched(target)

    def _moved(
        self,
        parent: Node,
        name: bytes,
        source: Target,
        new_parent: Node,
        new_name: bytes,
        replaced: Target | None,
    ) -> None:
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_removed(parent, name, source.st.st_ino)
        tracker.mark_name(new_parent, new_name, replaced.st.st_ino if replaced is not None else ABSENT)
        self._mark_touched(source)

    def _exchanged(self, one: tuple[Node, bytes, Target], other: tuple[Node, bytes, Target]) -> None:
        (parent, name, here), (new_parent, new_name, there) = one, other
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_name(parent, name, here.st.st_ino)
        tracker.mark_name(new_parent, new_name, there.st.st_ino)
        self._mark_touched(here)
        self._mark_touched(there)

    def _mark_touched(self, target: Target) -> None:
        """Mark an inode whose link count or ctime has moved."""
        node = target.node
        if node is not None and node.parent is not None:
            self._state.tracker.mark_attrs(node)
        else:
            self._state.tracker.mark_ino(target.st.st_ino)


def _lstat_or_none(entry: PathHandle) -> os.stat_result | None:
    """Return the attributes of what a name leads to; None when it is free."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
