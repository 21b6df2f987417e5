"""Grants: tokens of the broker for what the kernel says of the callers of the page's Unix socket.

The broker accepts their connections, reads their credentials and nothing else, and hands each one to the process that faces browsers with
its caller's grant. Sessions keep the grant of who asked for their link. An order carries a grant, by which the broker, and not the process
that faces browsers, decides about it.

References: unix(7), SO_PEERCRED and SCM_RIGHTS.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import Final, NamedTuple, NoReturn, cast

import msgspec
import trio

from ciuic.cli.commands.web.access import SESSION_SECONDS, Access, user_name
from ciuic.cli.commands.web.rights import Admission, Grant, Right
from ciuic.errors import NotPermitted
from ciuic.protocol.peer_socket import Caller, caller_of
from ciuic.structs import decode_json
from ciuic.system.unix_sockets import descriptors_in, rights, room_for

_RENEWED_SECONDS: Final = 3600.0
# A link that is asked for right before a grant is renewed, and a session after it, end before the grant.
_GRANT_SECONDS: Final = SESSION_SECONDS + 2 * _RENEWED_SECONDS
_MAX_MESSAGE_BYTES: Final = 4096
_PAUSE_SECONDS: Final = 0.1


class _Given(NamedTuple):
    grant: Grant
    caller: Caller
    at: float


class Grants:
    """Grants that the broker has given.

    Args:
        admission: Who has which right.
        proxy_uid: User of the proxy, which says itself who its callers are; None for none.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self, admission: Admission, proxy_uid: int | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._admission = admission
        self._proxy_uid = proxy_uid
        self._now = now
        # By token, the oldest first.
        self._given: dict[str, _Given] = {}

    def of(self, caller: Caller) -> Grant:
        """Return the grant of a caller, an empty one for a stranger."""
        right = self._admission.right_of(caller)
        if right is Right.NONE:
            return Grant()
        now = self._now()
        for one in self._given.values():
            if one.caller == caller and now - one.at < _RENEWED_SECONDS:
                return one.grant
        self._given = {token: one for token, one in self._given.items() if now - one.at < _GRANT_SECONDS}
        name = "" if caller.uid == self._proxy_uid else user_name(caller.uid)
        grant = Grant(right=right, name=name, token=secrets.token_urlsafe(32))
        self._given[grant.token] = _Given(grant, caller, now)
        return grant

    def check(self, token: str, needed: Right) -> Grant:
        """Return the grant of a token. Raises NotPermitted where there is none, or its right is not enough."""
        one = self._given.get(token)
        if one is None or self._now() - one.at >= _GRANT_SECONDS:
            raise NotPermitted("the right to do this has ended", hint="load the page again, or log in again")
        self._admission.check(one.grant.right, needed)
        return one.grant

    async def hand_over(self, listener: socket.socket, channel: socket.socket) -> NoReturn:
        """Accept connections and send each over a channel, with its grant; never returns."""
        listening, sending = map(trio.socket.from_stdlib_socket, (listener, channel))
        while True:
            try:
                connection, _ = await listening.accept()
                with connection:
                    grant = self.of(caller_of(cast(socket.socket, connection)))
                    await sending.sendmsg([msgspec.json.encode(grant)], rights([connection.fileno()]))
            except OSError:
                # The caller has gone, or descriptors are short: as trio.serve_listeners waits then.
                await trio.sleep(_PAUSE_SECONDS)


class HandedListener(trio.abc.Listener[trio.SocketStream]):
    """Connections that the broker hands over.

    Args:
        channel: Descriptor of the other end of the broker's channel.
        access: Is told of the grants.
    """

    def __init__(self, channel: int, access: Access) -> None:
        self._channel = trio.socket.from_stdlib_socket(socket.socket(fileno=channel))
        self._access = access

    async def accept(self) -> trio.SocketStream:
        """Return the next connection."""
        while True:
            data, ancillary, _, _ = await self._channel.recvmsg(
                _MAX_MESSAGE_BYTES, room_for(1), socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                # The broker is gone, and the end of standard input ends this process.
                await trio.sleep_forever()
            # Without a descriptor where this process has too many.
            for fd in descriptors_in(ancillary):
                connection = socket.socket(fileno=fd)
                self._access.admit(caller_of(connection), decode_json(data, Grant))
                return trio.SocketStream(trio.socket.from_stdlib_socket(connection))

    async def aclose(self) -> None:
        """Close the channel."""
        self._channel.close()
        await trio.lowlevel.checkpoint()
