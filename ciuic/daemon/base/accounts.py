"""Look up users and groups: ids of those that the configuration names, and names of users for display.

Guarantees: no look-up runs on the event loop. The name service (LDAP, SSSD) may hang: its last answer stays
in force then, and the daemon goes on; at most one thread waits for it. A name that the service does not know
matches no user.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import structlog
import trio

from ciuic.daemon.base.events import Alerts
from ciuic.daemon.base.runtime import permit_control_group
from ciuic.errors import CiuicError

# Longest time for which a change of an account goes unnoticed. Group membership comes from the kernel and
# needs no look-up.
_REFRESH_SECONDS: Final = 60.0
# Time limit of one look-up, with much to spare for a directory service that answers at all.
LOOKUP_SECONDS: Final = 5.0
_EVERYBODY: Final = "*"
# Names that are remembered for display; users in a container are created at no cost, so the table is emptied
# when it is full.
_MAX_NAMES: Final = 4096
_T = TypeVar("_T")
log = structlog.get_logger(__name__)
_names: dict[int, str] = {}


class AccountNames(NamedTuple):
    """Accounts that the configuration names."""

    group: str | None
    """Value of `control.group`."""
    users: tuple[str, ...]
    """Value of `watch.users`."""


class Accounts:
    """Ids of configured accounts. `run` is its task; the attributes may be read at any time.

    Belongs to the trio thread.
    """

    def __init__(
        self,
        wanted: Callable[[], AccountNames],
        alerts: Alerts,
        *,
        control_socket: Path | None = None,
    ) -> None:
        """Prepare to look up.

        Args:
            wanted: returns the names of the configuration in force.
            alerts: where a name service that does not answer is reported.
            control_socket: socket that is given to the group, or taken back from it, when its id becomes
                known or changes while the daemon runs.
        """
        self.group_id: int | None = None
        """Id of the configured group; None: there is no such group, or it is not known yet."""
        self.user_ids: frozenset[int] = frozenset()
        self._wanted = wanted
        self._alerts = alerts
        self._control_socket = control_socket
        # Group that the control socket admits.
        self._permitted: int | None = None
        self._revoked = 0
        self._found: AccountNames | None = None
        # Limits look-ups to one thread: an abandoned look-up that hangs keeps the place, so that no second
        # one hangs beside it.
        self._name_service = trio.CapacityLimiter(1)

    @property
    def everybody(self) -> bool:
        """True if `watch.users` names everybody."""
        return _EVERYBODY in self._wanted().users

    def revoked(self) -> int:
        """Return how often the control socket was taken back from a group."""
        return self._revoked

    async def start(self) -> None:
        """Look up for the first time.

        Where the name service does not answer, the daemon goes on, and only root may use the control socket
        for now.

        Raises:
            CiuicError: there is no such group.
        """
        group = self._wanted().group
        if await self.refresh() and group and self.group_id is None:
            raise CiuicError(
                f"there is no group {group}", hint="make it, or change [control] group in the configuration"
            )

    async def run(self) -> None:
        """Look up every `_REFRESH_SECONDS`, until cancelled."""
        while True:
            await self.refresh()
            await trio.sleep(_REFRESH_SECONDS)

    async def refresh(self) -> bool:
        """Look up now, and return whether the name service answered in time."""
        wanted = self._wanted()
        if self._found is not None and self._found != wanted:
            # The known ids are of other names, and no user is better than a wrong one.
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
            if len(_names) >= _MAX_NAMES:
                _names.clear()
            _names[uid] = name

    async def learn_names(self, uids: Iterable[int]) -> None:
        """Look up the names of several users, one after the other."""
        for uid in set(uids):
            await self.learn_name(uid)

    async def _ask(self, look_up: Callable[[], _T]) -> _T | None:
        with trio.move_on_after(LOOKUP_SECONDS):
            return await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=self._name_service)
        return None

    def _set_group(self, group_id: int | None) -> None:
        self.group_id = group_id
        if self._control_socket is None or group_id == self._permitted:
            return
        try:
            # For None too: as long as the socket has the old group, its members are administrators.
            permit_control_group(self._control_socket, group_id)
        except FileNotFoundError:
            pass  # the daemon has not created it yet, and will do so with this group
        except OSError as error:
            # `_permitted` stays as it is, so that the next look-up tries again.
            log.error("control_group_not_set", group_id=group_id, error=str(error))
            return
        # After the mode: a connection that counts as made later was not let in by the old group.
        self._revoked += self._permitted is not None
        self._permitted = group_id


def user_name(uid: int) -> str:
    """Return the name of a user if it was looked up before, else the number. Asks no service."""
    return "root" if uid == 0 else _names.get(uid, str(uid))


def _ids_of(wanted: AccountNames) -> tuple[int | None, frozenset[int]]:
    users = set()
    for name in wanted.users:
        try:
            users.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            if name != _EVERYBODY:
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
