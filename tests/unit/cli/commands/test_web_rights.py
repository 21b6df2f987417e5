"""Rights on the page: each route and each action has one, and is refused to who has less."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import trio

pytest.importorskip("jinja2")

from ciuic.cli.commands.web import broker, rights
from ciuic.cli.commands.web.access import LINK_SECONDS, SESSION_SECONDS, Access, Grants
from ciuic.cli.commands.web.front import Asked, Front
from ciuic.cli.commands.web.rights import ACTIONS, ROUTES, TYPED, Admission, Grant, Right, RightGroup
from ciuic.errors import NotPermitted
from ciuic.protocol.http_server import Reply, Request
from ciuic.protocol.peer_socket import Caller

_GIDS = {Right.NONE: 0, Right.LOOK: 7, Right.RESTORE: 8, Right.DECIDE: 9}
_NAMED = Admission(
    groups=tuple(RightGroup(right, f"may-{right.name}", gid) for right, gid in _GIDS.items() if right)
)


async def _serve(asked: Asked) -> Reply:
    return Reply(200, b"served")


class _Page:
    """Front whose pages all say `served`."""

    def __init__(self, admission: Admission = _NAMED) -> None:
        self.access = Access()
        self.grants = Grants(admission)

        async def no_actions(path: str) -> bytes:
            return b"[]"

        nothing: Any = SimpleNamespace(ask=no_actions)
        self.front = Front(
            self.access, nothing, nothing, nothing, admission=admission, may_act=True, host="h"
        )
        self.front._routes = dict.fromkeys(self.front._routes, _serve)

    def ask(self, method: str, path: str, right: Right, fields: str = "") -> Reply:
        """Ask as a member of the group that has a right; a form carries its token."""
        caller = Caller(4321, frozenset({_GIDS[right]}))
        self.access.admit(caller, self.grants.of(caller))
        request = Request(method, path, headers={"host": "localhost"}, caller=caller)
        person = self.access.person(request)
        csrf = f"csrf={person.csrf}&" if person is not None else ""
        return trio.run(self.front.answer, request._replace(query=csrf + fields))


def test_each_route_needs_its_right() -> None:
    """Every route of the front is served to who has its right, and to nobody one level below."""
    page = _Page()
    assert page.front._routes.keys() == ROUTES.keys()
    for (method, path), needed in ROUTES.items():
        assert page.ask(method, path, needed).body == b"served"
        refused = page.ask(method, path, Right(needed - 1))
        assert refused.status == (401 if needed is Right.LOOK else 403), path


@pytest.mark.parametrize("fields", ["kind={}", "kindq={}", "kind=restore&kind={}", "kind=restore&kindq={}"])
def test_each_action_needs_its_right(fields: str) -> None:
    """Every action of the broker has a right; whichever field of a form names it, less is refused, with the groups that suffice."""
    page = _Page()
    assert ACTIONS.keys() == set(get_args(broker.Kind))
    assert TYPED.keys() < broker.CHANGES < ACTIONS.keys()
    for kind, needed in ACTIONS.items():
        served: list[str] = []

        async def note(asked: Asked, served: list[str] = served) -> Reply:
            served.append(asked.get("kind"))
            return Reply(200)

        page.front._routes["POST", "/act"] = note
        for right in (Right.LOOK, Right.RESTORE, Right.DECIDE):
            del served[:]
            reply = page.ask("POST", "/act", right, fields.format(kind))
            if right < needed:
                # Read as another action, it is served as that one.
                assert served in ([], ["restore"])
                if not served:
                    assert reply.status == 403
                    assert b"may-DECIDE may" in reply.body
            else:
                assert len(served) == 1


def test_a_route_without_a_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in the table is served to nobody, root included."""
    monkeypatch.setattr(rights, "ROUTES", {})
    page = _Page(Admission(uids=(4321,)))
    assert page.ask("GET", "/", Right.DECIDE).status == 404


def test_a_refusal_says_what_would_help() -> None:
    """Where no group has a right, the configuration key that names one is said."""
    page = _Page(Admission(groups=(RightGroup(Right.LOOK, "ml", 7),)))
    refused = page.ask("GET", "/restore", Right.LOOK)
    assert refused.status == 403
    assert b"only root and the user who runs ciuic web may restore" in refused.body
    assert b"web.restore_group" in refused.body


def test_a_grant_outlives_the_sessions_that_it_begins() -> None:
    """A caller has one grant for an hour; each is known for as long as a session that began with it, and not after that."""
    now = [1000.0]
    grants = Grants(_NAMED, proxy_uid=33, now=lambda: now[0])
    caller = Caller(4321, frozenset({_GIDS[Right.RESTORE]}))
    first = grants.of(caller)
    now[0] += 3599
    assert grants.of(caller) == first
    # A link that is asked for now is taken in time, and its session lasts.
    now[0] += LINK_SECONDS
    second = grants.of(caller)
    assert second.token != first.token
    now[0] += SESSION_SECONDS
    assert grants.check(first.token, Right.RESTORE) == first
    now[0] += 7200
    for token in (first.token, second.token, "", "guess"):
        with pytest.raises(NotPermitted):
            grants.check(token, Right.NONE)
    assert grants.of(Caller(4321, frozenset({1}))) == Grant()
    # Who calls is the proxy's to say, and nobody else's.
    assert grants.of(Caller(33, caller.groups)).name == ""
    assert grants.of(caller).name == "4321"


def test_the_broker_decides_by_the_grant(tmp_path: Path) -> None:
    """Whatever the front lets through, an order is carried out with a grant that has its right alone, in the name of the grant."""
    grants = Grants(_NAMED)
    log = broker.ActionLog(tmp_path)

    def order(kind: Any, right: Right) -> broker.Order:
        token = grants.of(Caller(4321, frozenset({_GIDS[right]}))).token
        return broker.Order(
            kind=kind, who="root", grant=token, snapshot="cs-abcdef", paths=("/a/b",),
            typed={"restore": "b"}.get(kind, "cs-abcdef"),
        )  # fmt: skip

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nothing: Any = None
            asked = broker.Broker(
                nothing, ["true"], may_act=True, log=log, looks=nothing, grants=grants, nursery=nursery
            )

            async def status_of(made: broker.Order) -> int:
                reply = await asked.answer(Request("POST", "/actions", body=msgspec.json.encode(made)))
                return reply.status

            for kind, needed in ACTIONS.items():
                # There is no action of the number 0.
                done = 400 if kind == "stop" else 202
                for right in Right:
                    assert await status_of(order(kind, right)) == (done if right >= needed else 403), kind
                # What stops an action needs what the action does.
                last = msgspec.structs.replace(order("stop", Right.RESTORE), action=max(asked._actions))
                assert await status_of(last) == (202 if ACTIONS[kind] <= Right.RESTORE else 403), kind
            for kind in TYPED:
                untyped = msgspec.structs.replace(order(kind, Right.DECIDE), typed="other")
                assert await status_of(untyped) == 400

    trio.run(main)
    assert {one.who for one in log.lines()} == {"4321"}
