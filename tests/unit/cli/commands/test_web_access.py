"""Who is let in to the page: sessions, links, peers, proxies, and where requests come from."""

from __future__ import annotations

import pytest

from ciuic.cli.commands.web.access import COOKIE, LINK_SECONDS, Access, Grants, Misdirected, Person
from ciuic.cli.commands.web.rights import Admission, Grant, Right, RightGroup
from ciuic.errors import NotPermitted
from ciuic.protocol.http_server import Request
from ciuic.protocol.peer_socket import Caller

ANNA = Person("anna", "", Grant(right=Right.RESTORE), has_session=False)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(
    headers: dict[str, str] | None = None, caller: Caller | None = None, method: str = "GET"
) -> Request:
    return Request(method, "/", headers={"host": "localhost:1", **(headers or {})}, caller=caller)


def peer(uid: int, *groups: int) -> Caller:
    return Caller(uid, frozenset(groups))


def test_a_link_works_once_and_not_for_long() -> None:
    """A link is taken by its first use and is void after five minutes; a session ends when it idles and after half a day."""
    clock = Clock()
    access = Access(now=clock)
    late = access.new_link(ANNA)
    clock.now += LINK_SECONDS
    with pytest.raises(NotPermitted):
        access.log_in(late, is_secure=False)
    token = access.new_link(ANNA)
    cookie = access.log_in(token, is_secure=True)
    with pytest.raises(NotPermitted):
        access.log_in(token, is_secure=False)
    assert {"HttpOnly", "SameSite=Strict", "Secure", "Path=/"} <= set(cookie.split("; "))
    asks = request({"cookie": f"other=1; {cookie.partition(';')[0]}"})
    person = access.person(asks)
    assert person is not None
    assert (person.name, person.right) == ("anna", Right.RESTORE)
    for _ in range(13):
        assert access.person(asks) is not None
        clock.now += 3500
    assert access.person(asks) is None


def test_a_session_that_idles_ends() -> None:
    """An hour without a request ends a session, and so does logging out."""
    clock = Clock()
    access = Access(now=clock)
    cookies = [access.log_in(access.new_link(ANNA), is_secure=False).partition(";")[0] for _ in range(2)]
    idle, left = (request({"cookie": cookie}) for cookie in cookies)
    assert access.log_out(left).startswith(f"{COOKIE}=;")
    assert access.person(left) is None
    clock.now += 3601
    assert access.person(idle) is None


@pytest.mark.parametrize(
    ("caller", "headers", "name", "right"),
    [
        (peer(0), {}, "root", Right.DECIDE),
        (peer(4321, 7), {}, "4321", Right.LOOK),
        (peer(4321, 7, 8), {}, "4321", Right.RESTORE),
        (peer(4321, 9), {}, "4321", Right.DECIDE),
        (peer(4321), {}, None, None),
        (None, {}, None, None),
        (None, {"x-remote-user": "anna"}, None, None),
        (peer(4321, 7), {"x-remote-user": "root"}, "4321", Right.LOOK),
        (peer(33, 7), {"x-remote-user": "root"}, "root", Right.LOOK),
        (peer(33), {"x-remote-user": "root"}, None, None),
        (peer(33, 9), {}, None, None),
        (peer(33, 9), {"x-remote-user": "a\x1bb"}, None, None),
        (None, {"cookie": f"{COOKIE}=stolen"}, None, None),
    ],
)
def test_who_calls_is_what_the_kernel_or_the_proxy_says(
    caller: Caller | None, headers: dict[str, str], name: str | None, right: Right | None
) -> None:
    """Users and groups, and so rights, are those of the socket; a proxy's header gives a name, and the proxy's right."""
    groups = (
        RightGroup(Right.LOOK, "l", 7),
        RightGroup(Right.RESTORE, "r", 8),
        RightGroup(Right.DECIDE, "d", 9),
    )
    access = Access(user_header="X-Remote-User")
    if caller is not None:
        access.admit(caller, Grants(Admission(groups=groups), proxy_uid=33).of(caller))
    person = access.person(request(headers, caller))
    assert (person and (person.name, person.right)) == (name and (name, right))
    asks = access.may_ask_for_links(request(headers, caller))
    assert asks == (person if caller is not None and caller.uid != 33 else None)


def test_a_session_has_the_right_of_its_link() -> None:
    """A link gives the right that who asked for it had, whoever takes it, and whatever socket it is taken over."""
    access = Access()
    for right in (Right.LOOK, Right.RESTORE, Right.DECIDE):
        link = access.new_link(ANNA._replace(grant=Grant(right=right)))
        cookie = access.log_in(link, is_secure=False).partition(";")[0]
        person = access.person(request({"cookie": cookie}, peer(0)))
        assert person is not None
        assert person.right is right


@pytest.mark.parametrize(
    ("headers", "method", "error"),
    [
        ({}, "GET", None),
        ({"host": "127.0.0.1:8470"}, "GET", None),
        ({"host": "[::1]:8470"}, "GET", None),
        ({"host": "GPU07.example.org"}, "GET", None),
        ({"host": "evil.example"}, "GET", Misdirected),
        ({"host": "localhost.evil.example"}, "GET", Misdirected),
        ({"host": ""}, "GET", Misdirected),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, "GET", None),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, "GET", NotPermitted),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, "GET", NotPermitted),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, "POST", NotPermitted),
        ({"origin": "http://localhost:1"}, "POST", None),
        ({"origin": "http://localhost:2"}, "POST", NotPermitted),
        ({"origin": "https://evil.example"}, "POST", NotPermitted),
        ({"origin": "null"}, "POST", NotPermitted),
    ],
)
def test_requests_for_others_and_of_others_are_refused(
    headers: dict[str, str], method: str, error: type[Exception] | None
) -> None:
    """A request names this host, and is made by this page or by the person."""
    access = Access(hosts=["gpu07.example.org"])
    if error is None:
        access.check_origin(request(headers, method=method))
    else:
        with pytest.raises(error):
            access.check_origin(request(headers, method=method))


def test_forms_carry_the_token_of_the_session() -> None:
    """A form with another token, or with that of another session, is refused."""
    access = Access()
    people = []
    for _ in range(2):
        cookie = access.log_in(access.new_link(ANNA), is_secure=False).partition(";")[0]
        person = access.person(request({"cookie": cookie}))
        assert isinstance(person, Person)
        people.append(person)
    access.check_form(people[0], people[0].csrf)
    for token in ("", people[1].csrf, "\udcff"):
        with pytest.raises(NotPermitted):
            access.check_form(people[0], token)
