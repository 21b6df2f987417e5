"""Users and groups that the configuration names, as the numbers by which the kernel knows them; and names of users, for people.

Guarantees: no look-up runs on the event loop. The name service (LDAP, SSSD) may hang: then what it said last stays in force, and the
daemon goes on; one thread waits for it at most. A name that the service says does not exist stands for nobody.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import structlog
import trio

from ciuic.daemon.alerts import Alerts
from ciuic.daemon.runtime import permit_control_group
from ciuic.errors import CiuicError

REFRESH_SECONDS: Final = 60.0
"""So long a change of an account may go unnoticed. Group membership itself is the kernel's word and needs no look-up."""
LOOKUP_SECONDS: Final = 5.0
"""What a directory service that answers at all needs, with much to spare."""
EVERYBODY: Final = "*"
MAX_NAMES: Final = 4096
T = TypeVar("T")
log = structlog.get_logger(__name__)
_names: dict[int, str] = {}


class Wanted(NamedTuple):
    """What the configuration names."""

    group: str | None
    """``control.group``"""
    users: tuple[str, ...]
    """``watch.users``"""


class Accounts:
    """``run`` is its task; the attributes may be read at any time. Belongs to the trio thread."""

    def __init__(
        self,
        wanted: Callable[[], Wanted],
        alerts: Alerts,
        *,
        control_socket: Path | None = None,
    ) -> None:
        """``control_socket`` is given to the group when its number becomes known, or changes, while the daemon runs."""
        self.group_id: int | None = None
        """None: there is no such group, or nobody knows yet."""
        self.user_ids: frozenset[int] = frozenset()
        self._wanted = wanted
        self._alerts = alerts
        self._control_socket = control_socket
        self._found: Wanted | None = None
        self._name_service = trio.CapacityLimiter(1)
        """A look-up that hangs keeps its place, so that no other thread is started to hang beside it."""

    @property
    def everybody(self) -> bool:
        """Whether ``watch.users`` names everybody."""
        return EVERYBODY in self._wanted().users

    async def start(self) -> None:
        """Look up for the first time. CiuicError when there is no such group.

        Where the name service does not say, the daemon goes on, and only root may use the control socket for now.
        """
        group = self._wanted().group
        if await self.refresh() and group and self.group_id is None:
            raise CiuicError(
                f"there is no group {group}", hint="make it, or change [control] group in the configuration"
            )

    async def run(self) -> None:
        """Look up again and again, for ever."""
        while True:
            await self.refresh()
            await trio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> bool:
        """Look up now; whether the name service answered in time."""
        wanted = self._wanted()
        if self._found is not None and self._found != wanted:
            # What was known is of other names: better nobody than somebody else.
            if self._found.group != wanted.group:
                self._set_group(None)
            self.user_ids = frozenset()
        answer = await self._ask(lambda: _ids_of(wanted))
        if answer is None:
            self._found = None if self._found != wanted else wanted
            self._alerts.report(
                "accounts",
                f"the name service did not say within {LOOKUP_SECONDS:g} s who the users and groups of the configuration are",
                hint="what it said last stays in force; see getent group, getent passwd",
                severity="warning",
            )
            return False
        self._alerts.clear("accounts")
        group_id, self.user_ids = answer
        self._set_group(group_id)
        self._found = wanted
        return True

    async def learn_name(self, uid: int) -> None:
        """Look up the name of a user for `user_name`; returns after `LOOKUP_SECONDS` at the latest."""
        if uid in _names or uid == 0:
            return
        name = await self._ask(lambda: _name_of(uid))
        if name is not None:
            if len(_names) >= MAX_NAMES:
                _names.clear()
            _names[uid] = name

    async def learn_names(self, uids: Iterable[int]) -> None:
        for uid in set(uids):
            await self.learn_name(uid)

    async def _ask(self, look_up: Callable[[], T]) -> T | None:
        with trio.move_on_after(LOOKUP_SECONDS):
            return await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=self._name_service)
        return None

    def _set_group(self, group_id: int | None) -> None:
        if group_id != self.group_id:
            self.group_id = group_id
            if group_id is not None and self._control_socket is not None:
                try:
                    permit_control_group(self._control_socket, group_id)
                except FileNotFoundError:
                    pass  # before the daemon has made it, with this group
                except OSError as error:
                    log.error("control_group_not_set", group_id=group_id, error=str(error))


def user_name(uid: int) -> str:
    """The name of a user as far as it is known, else the number. Asks nobody."""
    return "root" if uid == 0 else _names.get(uid, str(uid))


def _ids_of(wanted: Wanted) -> tuple[int | None, frozenset[int]]:
    users = set()
    for name in wanted.users:
        try:
            users.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            if name != EVERYBODY:
                log.warning("user_not_found", name=name)
    try:
        return grp.getgrnam(wanted.group).gr_gid if wanted.group else None, frozenset(users)
    except KeyError:
        log.warning("group_not_found", name=wanted.group)
        return None, frozenset(users)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
