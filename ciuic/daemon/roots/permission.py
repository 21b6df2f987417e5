"""Permission rule of the daemon's sockets, by the user and group ids that the kernel has of the caller.

The caller's user is that of SO_PEERCRED, its groups are those of SO_PEERGROUPS (ciuic.protocol.peer_socket):
the credentials of the process, not what an account database says of its user. `control.sock` needs no rule
here: its mode and group admit root and members of `control.group`, who are administrators of the daemon.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.protocol.peer_socket import Caller

ROOT = 0


def is_administrator(caller: Caller, group_id: int | None) -> bool:
    """Return whether the caller is root or a member of the group of the control socket."""
    # None, where no group is configured or known, is in no set of groups.
    return caller.uid == ROOT or group_id in caller.groups


def owns(caller: Caller, root: RootSupervisor) -> bool:
    """Return whether a mounted root belongs to the caller.

    It belongs to the user of the caller, or to one of its groups that may write there.
    """
    if root.worker is None:
        return False
    # By the descriptor of the backing directory: the path leads through the overlay, whose worker may hang.
    facts = os.fstat(root.worker.backing_fd)
    return facts.st_uid == caller.uid or (
        facts.st_gid in caller.groups and bool(facts.st_mode & stat.S_IWGRP)
    )


def owners(roots: Iterable[RootSupervisor]) -> frozenset[int]:
    """Return the users that mounted roots belong to. For the trio thread, on which workers are closed."""
    found = set()
    for root in roots:
        if root.worker is not None:
            # No duplicate of the descriptor: this runs with every heartbeat of a receiver, also when no
            # descriptor is left (EMFILE). A root whose disk fails has no owner for now, and the others have.
            with suppress(OSError):
                found.add(os.fstat(root.worker.backing_fd).st_uid)
    return frozenset(found)


class WatchPermission(NamedTuple):
    """Rule for users whose trainers are watched: administrators, `watch.users` and owners of roots."""

    group_id: int | None = None
    everybody: bool = False
    user_ids: frozenset[int] = frozenset()
    owners: frozenset[int] = frozenset()

    def __call__(self, caller: Caller) -> bool:
        return (
            self.everybody
            or is_administrator(caller, self.group_id)
            or caller.uid in self.user_ids
            or caller.uid in self.owners
        )
