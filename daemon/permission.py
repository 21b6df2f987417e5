"""The one rule of who may have what done through the daemon's sockets: by the numbers that the kernel has of the caller.

The caller's user is that of SO_PEERCRED, its groups are those of SO_PEERGROUPS (ciuic.peer_socket): what the process has, not what an
account database says its user should have. `control.sock` needs no rule here: its mode and group let in root and members of
`control.group`, who are administrators of the daemon.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from ciuic.daemon.supervisor import RootSupervisor
from ciuic.peer_socket import Caller

ROOT = 0


def is_administrator(caller: Caller, group_id: int | None) -> bool:
    """Return whether the caller is root or a member of the group of the control socket."""
    return caller.uid == ROOT or group_id in caller.groups


def owns(caller: Caller, root: RootSupervisor) -> bool:
    """Return whether a mounted root belongs to the caller: the directory is its user's, or a group's of its that may write there."""
    if root.worker is None:
        return False
    facts = os.fstat(root.worker.backing_fd)
    return facts.st_uid == caller.uid or (
        facts.st_gid in caller.groups and bool(facts.st_mode & stat.S_IWGRP)
    )


class WatchPermission(NamedTuple):
    """Whose trainers are watched: those of administrators, of ``watch.users`` and of owners of roots."""

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
