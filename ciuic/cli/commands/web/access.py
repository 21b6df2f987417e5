"""Access to the page: callers of the Unix socket, one-time links, sessions, and the origin of requests.

Guarantees:

* Nobody is let in by a network address. Over the Unix socket the kernel says who calls, and so which grant they have (`Grants`). Over TCP a
  session is needed, which begins with a one-time link that one of those has asked for, and has the grant that they had then.
* A name in a proxy's header counts only on connections of `web.proxy_user` over the Unix socket, and gives the right of that user.
* A request must name this host (`Host`), so that a name of the web that leads here gets no answer (DNS rebinding), and must not be made
  by another site's page (`Sec-Fetch-Site`, `Origin`). What changes something needs a token of the session as well, in the form.
* Secrets are random, compared in constant time and kept as digests; a link works once and for five minutes, a session for twelve hours
  and an hour without a request. They end with the process.

References: RFC 6265bis (cookies), Fetch Metadata (W3C), OWASP Cross-Site Request Forgery Prevention.

Grants are tokens of the broker for what the kernel says of the callers of the Unix socket. It accepts their connections, reads their credentials and nothing else, and hands each one to the process that faces browsers with
its caller's grant. Sessions keep the grant of who asked for their link. An order carries a grant, by which the broker, and not the process
that faces browsers, decides about it.

References: unix(7), SO_PEERCRED and SCM_RIGHTS.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import pwd
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn, cast

import msgspec
import trio

from ciuic.cli.commands.web.rights import Admission, Grant, Right
from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.protocol.http_server import Request
from ciuic.protocol.peer_socket import Caller, caller_of
from ciuic.structs import decode_json
from ciuic.system.unix_sockets import descriptors_in, rights, room_for

SESSION_SECONDS: Final = 12 * 3600.0
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


COOKIE: Final = "ciuic_session"
LINK_SECONDS: Final = 300.0
_IDLE_SECONDS: Final = 3600.0
_MAX_LINKS: Final = 100
_MAX_SESSIONS: Final = 1000
_MAX_NAME: Final = 100
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
_FETCHED_HERE: Final = frozenset({"same-origin", "none"})


class Misdirected(CiuicError):
    """The request names a host that this page is not."""

    exit_code = UsageError.exit_code


class Person(NamedTuple):
    """Somebody who is let in."""

    name: str
    csrf: str
    """Token that their forms carry."""
    grant: Grant
    has_session: bool
    """True if they came by a link, False if the kernel or a proxy says who they are."""

    @property
    def right(self) -> Right:
        """Right of the person's grant."""
        return self.grant.right


@dataclass
class _Session:
    name: str
    csrf: str
    grant: Grant
    is_secure: bool
    began: float
    seen: float = field(default=0.0)


@dataclass
class _Link:
    name: str
    grant: Grant
    until: float


class Access:
    """Decides about requests.

    Args:
        hosts: Names of this host beside localhost and addresses, as `web.hosts` has them.
        user_header: Name of the header in which a proxy says who calls.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        hosts: Collection[str] = (),
        user_header: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._user_header = user_header.lower()
        self._now = now
        self._secret = secrets.token_bytes(32)
        self._granted: dict[Caller, Grant] = {}
        self._links: dict[bytes, _Link] = {}
        self._sessions: dict[bytes, _Session] = {}

    # -- where a request comes from

    def check_origin(self, request: Request) -> None:
        """Refuse a request that names another host, or that another site's page has made.

        Raises:
            Misdirected: it is for another host.
            NotPermitted: another site's page has made it.
        """
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            raise Misdirected(
                "this page does not answer to that name", hint="add it to `web.hosts`, or use localhost"
            )
        site = request.headers.get("sec-fetch-site", "none")
        is_navigation = (
            request.headers.get("sec-fetch-mode") == "navigate" and request.method in _SAFE_METHODS
        )
        if site not in _FETCHED_HERE and not is_navigation:
            raise NotPermitted("another site's page has made this request")
        origin = request.headers.get("origin")
        if origin is not None and (origin == "null" or origin.partition("://")[2].lower() != host.lower()):
            raise NotPermitted("another site's page has made this request")

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host).rstrip(".").lower()
        if name in self._hosts or name == "localhost":
            return True
        try:
            # Who controls a name chooses where it leads; nobody chooses where an address does.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    # -- who makes it

    def admit(self, caller: Caller, grant: Grant) -> None:
        """Take the grant of a caller of the Unix socket, which the broker gives."""
        if grant.right is Right.NONE:
            self._granted.pop(caller, None)
        else:
            self._granted[caller] = grant

    def person(self, request: Request) -> Person | None:
        """Return who makes a request; None for somebody who is not let in."""
        session = self._session(request)
        if session is not None:
            return Person(session.name, session.csrf, session.grant, has_session=True)
        return self._by_kernel(request.caller, request.headers)

    def may_ask_for_links(self, request: Request) -> Person | None:
        """Return a caller of the Unix socket who may ask for a login link; None for all others, the proxy's user included."""
        return self._by_kernel(request.caller, {})

    def _by_kernel(self, caller: Caller | None, headers: Mapping[str, str]) -> Person | None:
        grant = self._granted.get(caller) if caller is not None else None
        if grant is None:
            return None
        name = grant.name
        if not name:
            name = headers.get(self._user_header, "").strip() if self._user_header else ""
            if not name or len(name) > _MAX_NAME or not name.isprintable():
                return None
        csrf = hmac.new(self._secret, name.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
        return Person(name, csrf, grant, has_session=False)

    def check_form(self, person: Person, token: str) -> None:
        """Refuse a form that does not carry the token of the person. Raises NotPermitted."""
        if not hmac.compare_digest(person.csrf.encode(), token.encode("utf-8", "replace")):
            raise NotPermitted(
                "this form is not from this page, or from before it was restarted", hint="load the page again"
            )

    # -- links and sessions

    def new_link(self, person: Person) -> str:
        """Return the token of a new one-time link, which gives the person's grant."""
        now = self._now()
        self._links = {key: link for key, link in self._links.items() if link.until > now}
        while len(self._links) >= _MAX_LINKS:
            del self._links[next(iter(self._links))]
        token = secrets.token_urlsafe(32)
        self._links[_digest(token)] = _Link(person.name, person.grant, now + LINK_SECONDS)
        return token

    def log_in(self, token: str, *, is_secure: bool) -> str:
        """Take a link, and return the cookie of the session that begins.

        Args:
            token: Token of the link.
            is_secure: The browser came over HTTPS, and is to send the cookie over that alone.

        Raises:
            NotPermitted: there is no such link, or it was used.
        """
        link = self._links.pop(_digest(token), None)
        now = self._now()
        if link is None or link.until <= now:
            raise NotPermitted(
                "this link was used, or is older than five minutes", hint="ciuic web --login makes another"
            )
        self._sessions = {
            key: session for key, session in self._sessions.items() if not self._is_over(session, now)
        }
        while len(self._sessions) >= _MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        id_ = secrets.token_urlsafe(32)
        self._sessions[_digest(id_)] = _Session(
            link.name, secrets.token_hex(32), link.grant, is_secure, now, now
        )
        return self._cookie(id_, int(SESSION_SECONDS), is_secure=is_secure)

    def log_out(self, request: Request) -> str:
        """End the session of a request, and return the cookie that replaces it."""
        id_ = _cookie_of(request)
        session = self._sessions.pop(_digest(id_), None) if id_ else None
        return self._cookie("", 0, is_secure=session is not None and session.is_secure)

    def _session(self, request: Request) -> _Session | None:
        id_ = _cookie_of(request)
        key = _digest(id_)
        session = self._sessions.get(key) if id_ else None
        if session is None:
            return None
        now = self._now()
        if self._is_over(session, now):
            del self._sessions[key]
            return None
        session.seen = now
        return session

    @staticmethod
    def _is_over(session: _Session, now: float) -> bool:
        return now - session.began > SESSION_SECONDS or now - session.seen > _IDLE_SECONDS

    @staticmethod
    def _cookie(value: str, seconds: int, *, is_secure: bool) -> str:
        secure = "; Secure" if is_secure else ""
        return f"{COOKIE}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def user_name(uid: int) -> str:
    """Return the name of a user; the number where this machine has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _digest(secret: str) -> bytes:
    # Random secrets of 256 bits: a table of digests tells nothing, and a lookup in it no time that helps.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _cookie_of(request: Request) -> str:
    for part in request.headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""
