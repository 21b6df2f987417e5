"""Rights on the page: what each route and each action needs, and who has them.

Guarantees: a route that is not in `ROUTES` is refused to everybody. Rights build on each other: who may decide may restore, and who may
restore may look. docs/security.md has the table (`python -m ciuic.cli.reference docs/security.md`).
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from ciuic.errors import NotPermitted
from ciuic.protocol.peer_socket import Caller


class Right(enum.IntEnum):
    """Right on the page; each includes those below it."""

    NONE = 0
    LOOK = 1
    """See the page, and download what snapshots hold."""
    RESTORE = 2
    """Make plans, restore, and undo restores."""
    DECIDE = 3
    """Decide what is kept: take, hold, release and forget snapshots; start drills."""

    @property
    def key(self) -> str:
        """Configuration key of the group that has the right."""
        return f"web.{self.name.lower()}_group"


ROUTES: Final = {
    ("GET", "/"): Right.LOOK,
    ("GET", "/snapshots"): Right.LOOK,
    ("GET", "/snapshot"): Right.LOOK,
    ("GET", "/files"): Right.LOOK,
    ("GET", "/versions"): Right.LOOK,
    ("GET", "/find"): Right.LOOK,
    ("GET", "/compare"): Right.LOOK,
    ("GET", "/training"): Right.LOOK,
    ("GET", "/picture"): Right.LOOK,
    ("GET", "/changes"): Right.LOOK,
    ("GET", "/image"): Right.LOOK,
    ("GET", "/download"): Right.LOOK,
    ("GET", "/action"): Right.LOOK,
    ("GET", "/action/events"): Right.LOOK,
    ("GET", "/hosts"): Right.LOOK,
    ("GET", "/drills"): Right.LOOK,
    ("GET", "/alerts"): Right.LOOK,
    ("GET", "/log"): Right.LOOK,
    ("GET", "/events"): Right.LOOK,
    ("POST", "/logout"): Right.LOOK,
    ("GET", "/restore"): Right.RESTORE,
    ("GET", "/plan"): Right.RESTORE,
    ("POST", "/plan"): Right.RESTORE,
    # At least; the action that it asks for may need more.
    ("POST", "/act"): Right.RESTORE,
}
"""Right that each route of the front needs."""
ACTIONS: Final = {
    "plan": Right.RESTORE,
    "restore": Right.RESTORE,
    "undo": Right.RESTORE,
    # At least; it needs what the action does that it ends.
    "stop": Right.RESTORE,
    "snapshot": Right.DECIDE,
    "hold": Right.DECIDE,
    "release": Right.DECIDE,
    "tag": Right.DECIDE,
    "forget": Right.DECIDE,
    "drill": Right.DECIDE,
}
"""Right that each action of the broker needs."""
TYPED: Final = {
    "restore": "last name of the path or directory that is written, or of the directory above several paths",
    "undo": "id of the safety snapshot",
    "forget": "id of the snapshot",
}
"""Text that confirms each action that overwrites or deletes."""
_VERBS: Final = {
    Right.LOOK: "look at this page",
    Right.RESTORE: "restore from this page",
    Right.DECIDE: "decide from this page what is kept",
}


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Right of a person; the empty one is a stranger's."""

    right: Right = Right.NONE
    name: str = ""
    """Name of the user; empty for the proxy's, which says itself whose requests it passes on."""
    token: str = ""
    """Secret by which the broker knows the grant again (`grants`)."""


class RightGroup(msgspec.Struct, frozen=True):
    """Group whose members have a right."""

    right: Right
    name: str
    gid: int


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Users and groups that have rights."""

    uids: tuple[int, ...] = (0,)
    """Users who have all rights."""
    groups: tuple[RightGroup, ...] = ()

    def right_of(self, caller: Caller) -> Right:
        """Return the right of a process that has connected to the Unix socket."""
        if caller.uid in self.uids:
            return Right.DECIDE
        return max((one.right for one in self.groups if one.gid in caller.groups), default=Right.NONE)

    def check(self, held: Right, needed: Right) -> None:
        """Refuse what needs a higher right. Raises NotPermitted, which names the groups that have it."""
        if held >= needed:
            return
        names = [one.name for one in self.groups if one.right >= needed]
        if names:
            raise NotPermitted(
                f"only root and members of {' or '.join(names)} may {_VERBS[needed]}",
                hint="after a change of groups, log in on the host and ask for a new link",
            )
        raise NotPermitted(
            f"only root and the user who runs ciuic web may {_VERBS[needed]}",
            hint=f"`{needed.key}` names a group whose members may, too",
        )


ROOT_ALONE: Final = Admission()


def needed_right(method: str, path: str, kind: str) -> Right | None:
    """Return the right that a request needs, with the action that its form names; None where there is no such route."""
    needed = ROUTES.get((method, path))
    if needed is not None and path == "/act":
        return max(needed, ACTIONS.get(kind, needed))
    return needed


def rights_table() -> str:
    """Return the table of docs/security.md: who may do what on the page."""
    rows = ["| right | group | pages | actions (typed to confirm) |", "| --- | --- | --- | --- |"]
    for right in (Right.LOOK, Right.RESTORE, Right.DECIDE):
        pages = [
            f"`{path}`" for (method, path), needed in ROUTES.items() if needed is right and method == "GET"
        ]
        actions = [
            f"{kind} ({TYPED[kind]})" if kind in TYPED else kind
            for kind, needed in ACTIONS.items()
            if needed is right
        ]
        rows.append(f"| {right.name.lower()} | `{right.key}` | {', '.join(pages)} | {', '.join(actions)} |")
    return "\n".join(rows)
