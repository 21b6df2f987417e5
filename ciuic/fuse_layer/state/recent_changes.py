"""Changes of nodes by requests whose answers carry no attributes of theirs: of a directory whose names change, say.

The kernel drops its attributes of such a node when the request is answered. An answer to an older request (a lookup of the
directory, with its times from before) may reach the kernel's copy after that, because the thread that waits for it runs
late; the kernel would believe it for as long as the answer says. It drops an answer only where the node's ``attr_version``
has risen since the request (fs/fuse/inode.c, fuse_change_attributes), which a notification does and these changes do not.

So such a change takes back all answers from before it. A directory, which the kernel asks for mode and owner anew before each
further name then, is spared that: the first change after a quiet time takes answers back, and for some time its attributes are to be
told with a short life.

Guarantee: an answer with a long life is taken back by the next change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from ciuic.fuse_layer.state.node_table import Node

QUIET_SECONDS: Final = 1.0
LIFE_NS: Final = 10_000_000
"""Life of the attributes of a directory that was changed lately."""


class _Generations(NamedTuple):
    since: float
    """Time at which ``now`` was empty, as of `time.monotonic`."""
    now: set[int]
    before: set[int]


class RecentChanges:
    """Directories of one root that were changed in the last one to two times ``QUIET_SECONDS``. Thread-safe."""

    def __init__(self) -> None:
        # Replaced as a whole, without a lock. Where two threads do so at a time directories may be missed, whose next change
        # then takes answers back once more. A change is noted where it is in ``now``, attributes live long where it is in
        # neither: a second passes between the two, whichever thread looks first.
        self._kept = _Generations(time.monotonic(), set(), set())
        self.take_back: Callable[[int], None] = lambda node_id: None
        """Has the kernel drop the attributes of a node, and the answers to requests that it sent before."""

    def _generations(self) -> _Generations:
        kept, now = self._kept, time.monotonic()
        age = now - kept.since
        if age > QUIET_SECONDS:
            self._kept = kept = _Generations(now, set(), kept.now if age <= 2 * QUIET_SECONDS else set())
        return kept

    def changed(self, node: Node) -> None:
        """Note a change that was carried out, before the request is answered."""
        if node.is_dir:
            noted = self._generations().now
            if node.id in noted:
                return
            # In this order: attributes that are told meanwhile are of the time after the change, and live shortly.
            noted.add(node.id)
        self.take_back(node.id)

    def made(self, node: Node) -> None:
        """Note a new node, about which nothing was told yet."""
        if node.is_dir:
            self._generations().now.add(node.id)

    def __contains__(self, node_id: int) -> bool:
        kept = self._generations()
        return node_id in kept.now or node_id in kept.before
