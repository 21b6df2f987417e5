"""Forms of the page of `ciuic web`: what they send back is what it was, whatever bytes it has."""

from __future__ import annotations

from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote_from_bytes, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jinja2")

from ciuic.cli.commands.web.access import Person
from ciuic.cli.commands.web.front import Asked, _fields, _templates
from ciuic.cli.commands.web.rights import Grant, Right
from ciuic.protocol.http_server import Request

_PERSON = Person("somebody", "0" * 64, Grant(right=Right.DECIDE), has_session=False)
_TEMPLATES = _templates()
_NAMES = st.one_of(
    st.binary(min_size=1, max_size=30),
    st.text(min_size=1, max_size=10).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.sampled_from([b"\n", b"\r", b" ", b"%41", b"+", b"&amp;", b'"', b"\\xff", b"\xff", b"\xc2\xa0"]))
    .map(b"".join)
    .filter(bool),
).map(lambda name: name.replace(b"\0", b"").replace(b"/", b"") or b"x")  # fmt: skip
_PATHS = _NAMES.map(lambda name: b"/data/" + (name + b"x" if name in (b".", b"..") else name))


class _Forms(HTMLParser):
    """What a browser makes of the forms of a page (HTML, 4.10.21.4): (action, fields) of each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.forms: list[tuple[str, list[tuple[str, str]]]] = []
        self._select: str | None = None
        self.feed(page.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in a form, a field or an option."""
        found = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.forms.append((found.get("action", ""), []))
        elif tag == "select":
            self._select = found["name"]
        elif tag == "option" and self._select is not None:
            fields = self.forms[-1][1]
            chosen = [at for at, (name, _) in enumerate(fields) if name == self._select]
            if not chosen:
                fields.append((self._select, found["value"]))
            elif "selected" in found:
                fields[chosen[0]] = (self._select, found["value"])
        elif tag == "input" and "name" in found:
            if found.get("type") in ("checkbox", "radio") and "checked" not in found:
                return
            value = found.get("value", "")
            value = value.replace("\n", "\r\n") if found.get("type") == "hidden" else value.replace("\n", "")
            self.forms[-1][1].append((found["name"], value))


def _asked(query: str, body: str = "") -> Asked:
    request = Request("GET", "/", query, body.encode())
    return Asked(request, _PERSON, _fields(request))


def _sent_back(template: str, action: str, **values: Any) -> Asked:
    """Return what the form of a page asks for when nothing in it is changed."""
    page = _TEMPLATES.get_template(template).render(
        person=_PERSON, may_act=True, restores=True, decides=True,
        host="host", remote="", tag="", version="", now_ns=0, **values,
    )  # fmt: skip
    forms = _Forms(page.encode("utf-8", "backslashreplace").decode()).forms
    target, fields = next(one for one in forms if one[0].startswith(action))
    is_get = "?" not in target
    sent = urlencode(fields)
    return _asked(sent) if is_get else _asked(target.partition("?")[2], sent)


_SNAPSHOT = SimpleNamespace(id="cs-1", time_ns=0, host="host")


@given(path=_PATHS, start=_NAMES)
def test_a_directory_and_the_beginning_of_names_come_back(path: bytes, start: bytes) -> None:
    """The filter of a directory's names sends the directory and the text that it was shown with."""
    listing = SimpleNamespace(snapshot=_SNAPSHOT, entry=None, entries=[], after=None)
    asked = _asked(f"s=latest&start={quote_from_bytes(start)}")
    back = _sent_back(
        "files.html", "/files", asked=asked, path=path, listing=listing, versions=None, lines=None,
        older=None, newer=None, judged={},
    )  # fmt: skip
    assert back.get("s") == "latest"
    assert back.path() == path
    assert back.get("start").encode("utf-8", "surrogateescape") == start


@given(pattern=_NAMES)
def test_a_pattern_comes_back(pattern: bytes) -> None:
    """A search can be repeated as it was."""
    asked = _asked(f"pattern={quote_from_bytes(pattern)}&deleted=1")
    back = _sent_back("find.html", "/find", asked=asked, found=None, trouble=None)
    assert back.get("pattern").encode("utf-8", "surrogateescape") == pattern
    assert back.get("deleted") == "1"


@given(paths=st.lists(_PATHS, min_size=1, max_size=12), dest=_PATHS, delete=st.booleans())
def test_what_a_plan_is_of_comes_back(paths: list[bytes], dest: bytes, delete: bool) -> None:
    """What is restored is what the plan was made for, in its order, where to, and what is removed."""
    progress = SimpleNamespace(said="", document={"items": [], "changing": 0}, code=0, words="", kind="plan")
    none = {"files": 0, "bytes": 0}
    plan = {"made": none, "replaced": none, "removed": none, "room": []}
    values = {
        "snapshot": _SNAPSHOT,
        "paths": paths,
        "above": dest or paths[0],
        "delete": delete,
        "progress": progress,
        "plan": plan,
        "has_room": True,
    }
    back = _sent_back("plan.html", "/act", asked=_asked(""), dest=dest, **values)
    assert back.paths() == paths
    assert back.path("dest") == dest
    assert back.get("delete") == ("1" if delete else "")
    assert _sent_back("plan.html", "/act", asked=_asked(""), dest=b"", **values).get("dest") == ""


@given(text=_NAMES, root=_PATHS, tag=st.text(min_size=1), host=st.text(min_size=1))
def test_filters_come_back(text: bytes, root: bytes, tag: str, host: str) -> None:
    """The filters of the snapshots are those that they were; none is none."""
    chosen = {"q": text, "root": root, "tag": tag, "h": host, "verdict": "TORN", "day": "2026-11-29"}
    query = urlencode(chosen, errors="surrogatepass")
    values = {"infos": [], "verdicts": {}, "start": 0, "rows": 100, "count": 0}
    choices = {"tags": ["other", tag], "roots": [b"/other", root], "hosts": ["other", host]}
    for asked in (_asked(query), _asked("")):
        back = _sent_back("snapshots.html", "/snapshots", asked=asked, **values, **choices)
        assert [back.get(name) for name in chosen] == [asked.get(name) for name in chosen]


@given(path=_PATHS)
def test_the_path_of_a_comparison_comes_back(path: bytes) -> None:
    """Other snapshots are compared at the same path."""
    values = {"found": None, "infos": [], "verdicts": {}, "difference": None, "trouble": None}
    assert _sent_back("compare.html", "/compare", asked=_asked(""), path=path, **values).path() == path


def test_what_is_typed_instead_counts() -> None:
    """A text that a person has changed replaces the one that was shown."""
    assert _asked("startq=%25ff&start=%5Cudcff").get("start") == "\udcff"
    assert _asked("startq=%25ff&start=new").get("start") == "new"
    assert _asked("startq=%25ff&start=").get("start") == ""
