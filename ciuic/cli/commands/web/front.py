"""The page: what each address shows, as HTML, and what its forms ask for.

Guarantees: names and contents of snapshots are text or attributes, escaped by the templates, and never markup; the only scripts and styles
are the two files beside the templates; an answer tells browsers to keep nothing, to load nothing from elsewhere and to be framed by
nobody. Nothing here changes anything: forms become orders to the broker.

References: Content Security Policy Level 3; RFC 6266 (Content-Disposition); WCAG 2.1.
"""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import stat
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, quote_from_bytes, unquote, unquote_to_bytes, urlencode

import jinja2
import msgspec
import structlog
import trio

from ciuic import __version__
from ciuic.cli.commands.pick.answers import size_of
from ciuic.cli.commands.web.access import Access, Misdirected, Person
from ciuic.cli.commands.web.broker import (
    CHANGES,
    LogLine,
    Order,
    Progress,
    last_name,
    shown_words,
    words_of,
)
from ciuic.cli.commands.web.broker import MAX_PATHS as MAX_RESTORED
from ciuic.cli.commands.web.changes import (
    MAX_DIRECTORIES,
    MAX_PATHS,
    MAX_PATHS_OF_OVERVIEW,
    WINDOWS,
    ChangeCounts,
    lately_changed,
)
from ciuic.cli.commands.web.comparing import MAX_CHANGES, compared
from ciuic.cli.commands.web.jobs import (
    CompareQuestion,
    Difference,
    FindQuestion,
    FoundRows,
    Question,
    Tensors,
    TensorsQuestion,
    TrainingNumbers,
    TrainingQuestion,
)
from ciuic.cli.commands.web.live import Live, SocketClient
from ciuic.cli.commands.web.reading import PIECE_BYTES, LastGoodCheckpoint, Readers, Reading, path_of
from ciuic.cli.commands.web.rights import Admission, Right, needed_right
from ciuic.cli.commands.web.training import MAX_MARKS, chart_of, timeline_of, value_at, with_before
from ciuic.cli.shared import times
from ciuic.errors import CiuicError, NotFound, NotPermitted, UsageError
from ciuic.printable import one_line
from ciuic.protocol.control_types import Incident, StatusDocument, trainer_key
from ciuic.protocol.http_server import Reply, Request, document, status_of
from ciuic.protocol.last_drill import standing_drill
from ciuic.repository import SnapshotInfo
from ciuic.repository.lookup import is_within, join
from ciuic.structs import convert, decode_json
from ciuic.system.shell_quoting import word
from ciuic.types import FACT_TAGS, is_safety
from ciuic.units import human_duration, human_size, plural
from ciuic.verdicts.records import DatedCheckpoint
from ciuic.verdicts.verdict import SUFFIXES

_HERE: Final = Path(__file__).parent
_PAGE_ROWS: Final = 100
_MAX_ROWS: Final = 10_000
_MAX_INCIDENTS: Final = 3
_PATIENCE_SECONDS: Final = 2.0
"""Longest wait for a plan before a page with its progress is shown."""
_HTML: Final = "text/html; charset=utf-8"
_HEADERS: Final = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
        " base-uri 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    # With no-referrer, the Origin of forms would be null.
    ("referrer-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("permissions-policy", "camera=(), microphone=(), geolocation=()"),
)
_NOT_KEPT: Final = ("cache-control", "no-store")
_MAX_FIELDS: Final = 50 + MAX_RESTORED
"""Limit of the fields of a request: the paths of a restore, one more of which the broker refuses by number, and others."""
_INCIDENT_SECONDS: Final = 24 * 3600
_COMPRESSED: Final = frozenset({"/picture", "/training"})
"""Pages with curves. Nothing that an asker chooses stands on them beside the token of forms, whose bytes sizes would tell."""
_WITHOUT_ACTIONS: Final = frozenset({"/image", "/download", "/picture", "/events", "/action/events"})
_MAX_ACTIONS: Final = 5
_ENDED_SECONDS: Final = 3600
"""Time for which every page offers to take a restore back."""
_PICTURE_SECONDS: Final = 60.0
"""Age at which the curves of an overview that is open are read again; they are at once when there is a new snapshot."""
_PICTURE_PAUSES: Final = 30
"""Least age by the time that it took to read them: of a long log that is most of a processor."""
log = structlog.get_logger(__name__)


class Asked(NamedTuple):
    """A request of a person."""

    request: Request
    person: Person
    fields: dict[str, str]
    """Fields of the query or the form; bytes that are not UTF-8 are surrogates."""
    actions: Sequence[Progress] = ()
    """Running actions, and restores that ended within the last hour, newest first."""

    def get(self, name: str) -> str:
        """Return a field as it was; empty if it is missing.

        A form sends it percent-encoded once more, as NAME + ``q``: browsers change line ends and what is no UTF-8. Beside that it
        may send what a person has made of the text that was shown, which counts if it is another.
        """
        encoded, typed = self.fields.get(f"{name}q"), self.fields.get(name)
        if encoded is None:
            return typed or ""
        original = unquote(encoded, errors="surrogateescape")
        return original if typed in (None, one_line(original)) else typed

    def path(self, name: str = "p") -> bytes:
        """Return a field that is a path. Raises UsageError."""
        return path_of(self.get(name))

    def paths(self) -> list[bytes]:
        """Return the path ``p``, or the percent-encoded ones of the fields ``also…``. Raises UsageError."""
        also = [
            unquote(text, errors="surrogateescape")
            for name, text in self.fields.items()
            if name.startswith("also")
        ]
        if not also:
            return [self.path()]
        return [path_of(text) for text in also]

    def number(self, name: str) -> int:
        """Return a field that is a number from 0 on; 0 if it is missing or none."""
        text = self.get(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


class _Drawn(NamedTuple):
    """Numbers as the overview has drawn them last."""

    newest: tuple[int, str]
    """Number of the snapshots then, and the newest."""
    at: float
    seconds: float
    """Time that it took to read them."""
    numbers: TrainingNumbers


_Handler = Callable[[Asked], Awaitable[Reply]]


class Front:
    """Resources of the page; see `ciuic.protocol.http_server`.

    Args:
        access: Who is let in.
        readers: Threads that read the snapshots.
        broker: The process that may act.
        live: Events for pages that are open.
        admission: Who has which right, for those who are refused.
        may_act: The broker carries out actions.
        host: Name of this host.
        remote: URL of the remote that is shown; empty for a repository of this host.
        links: Beginning of a login link, as ``http://127.0.0.1:8470``; empty where the page is on the Unix socket alone.
    """

    def __init__(
        self,
        access: Access,
        readers: Readers,
        broker: SocketClient,
        live: Live,
        *,
        admission: Admission,
        may_act: bool,
        host: str,
        links: str = "",
        remote: str = "",
    ) -> None:
        self._access = access
        self._readers = readers
        self._broker = broker
        self._live = live
        self._admission = admission
        self._may_act = may_act
        self._host = host
        self._links = links
        self._remote = remote
        self._counts = ChangeCounts()
        self._drawn: _Drawn | None = None
        self._drawing = trio.Lock()
        self._templates = _templates()
        self._static = {
            path.name: path.read_bytes() for path in sorted((_HERE / "static").iterdir()) if path.is_file()
        }
        self._tag = hashlib.sha256(b"".join(self._static.values())).hexdigest()[:12]
        self._routes: dict[tuple[str, str], _Handler] = {
            ("GET", "/"): self._overview,
            ("GET", "/snapshots"): self._snapshots,
            ("GET", "/snapshot"): self._snapshot,
            ("GET", "/files"): self._files,
            ("GET", "/versions"): self._versions,
            ("GET", "/find"): self._find,
            ("GET", "/compare"): self._compare,
            ("GET", "/training"): self._training,
            ("GET", "/picture"): self._picture,
            ("GET", "/changes"): self._changes,
            ("GET", "/image"): self._image,
            ("GET", "/download"): self._download,
            ("GET", "/restore"): self._restore,
            ("GET", "/action"): self._action,
            ("GET", "/action/events"): self._action_events,
            ("GET", "/hosts"): self._hosts,
            ("GET", "/drills"): self._drills,
            ("GET", "/alerts"): self._alerts,
            ("GET", "/log"): self._log,
            ("GET", "/events"): self._events,
            ("GET", "/plan"): self._plan,
            ("POST", "/plan"): self._make_plan,
            ("POST", "/act"): self._act,
            ("POST", "/logout"): self._log_out,
        }

    # -- requests

    async def answer(self, request: Request) -> Reply:
        """Answer a request of a browser. Raises nothing but cancellation."""
        try:
            reply = await self._answer(request)
        except CiuicError as error:
            reply = await self._failure(request, error)
        except Exception:
            log.exception("request_failed", method=request.method, path=request.path)
            reply = await self._failure(
                request, CiuicError("internal error", hint="the log of ciuic-web has the details")
            )
        if (
            request.path in _COMPRESSED
            and isinstance(reply.body, bytes)
            and "gzip" in request.headers.get("accept-encoding", "")
        ):
            reply = reply._replace(
                body=gzip.compress(reply.body, 5), headers=(*reply.headers, ("content-encoding", "gzip"))
            )
        kept = () if any(name == "cache-control" for name, _ in reply.headers) else (_NOT_KEPT,)
        own = {name for name, _ in reply.headers}
        more = tuple(header for header in _HEADERS if header[0] not in own)
        return reply._replace(
            headers=(*reply.headers, *kept, *more), is_known=self._access.person(request) is not None
        )

    async def _answer(self, request: Request) -> Reply:
        if request.path == "/login-link":
            return self._new_link(request)
        self._access.check_origin(request)
        method = "GET" if request.method == "HEAD" else request.method
        if method == "GET" and request.path.startswith("/static/"):
            return self._file_of_page(request.path.removeprefix("/static/"))
        if request.path == "/login":
            return self._log_in(request)
        person = self._access.person(request)
        if person is None:
            return self._page("login.html", None, {"token": ""}, 401)
        handler = self._routes.get((method, request.path))
        asked = Asked(request, person, _fields(request))
        needed = needed_right(method, request.path, asked.get("kind"))
        if handler is None or needed is None:
            raise NotFound("there is no such page", hint="the pages are in the menu above")
        self._admission.check(person.right, needed)
        if method == "POST":
            self._access.check_form(person, asked.fields.get("csrf", ""))
        if method == "GET" and request.path not in _WITHOUT_ACTIONS:
            asked = asked._replace(actions=_current(await self._actions()))
        return await handler(asked)

    async def _failure(self, request: Request, error: CiuicError) -> Reply:
        try:
            # What another site's page has asked for has nothing of the person in it.
            self._access.check_origin(request)
            person = self._access.person(request)
        except CiuicError:
            person = None
        status = 421 if isinstance(error, Misdirected) else status_of(error)
        return self._page("error.html", person, {"error": error}, status)

    def _file_of_page(self, name: str) -> Reply:
        data = self._static.get(name)
        if data is None:
            raise NotFound("there is no such file")
        kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        return Reply(
            200, data, f"{kind}; charset=utf-8", headers=(("cache-control", "private, max-age=604800"),)
        )

    def _page(self, template: str, person: Person | None, values: dict[str, Any], status: int = 200) -> Reply:
        text = self._templates.get_template(template).render(
            person=person,
            may_act=self._may_act,
            restores=person is not None and person.right >= Right.RESTORE,
            decides=self._may_act and person is not None and person.right >= Right.DECIDE,
            host=self._host,
            remote=self._remote,
            tag=self._tag,
            version=__version__,
            now_ns=time.time_ns(),
            **values,
        )
        return Reply(status, text.encode("utf-8", "backslashreplace"), _HTML)

    async def _rendered(
        self, template: str, asked: Asked, question: Callable[[Reading], dict[str, Any]]
    ) -> Reply:
        """Return a page whose values are read, and which is made, in a reader's thread."""
        return await self._readers.ask(
            lambda reading: self._page(template, asked.person, {"asked": asked, **question(reading)})
        )

    # -- being let in

    def _log_in(self, request: Request) -> Reply:
        fields = _fields(request)
        token = fields.get("token", "")
        # A link that is only looked at (a preview, a prefetch) must not be used up: a button takes it.
        if request.method != "POST":
            return self._page("login.html", None, {"token": token})
        is_secure = request.headers.get("origin", "").startswith("https://")
        cookie = self._access.log_in(token, is_secure=is_secure)
        return Reply(303, headers=(("location", "/"), ("set-cookie", cookie)))

    def _new_link(self, request: Request) -> Reply:
        # A command asks, and no browser, which would say where it comes from.
        is_browser = not {"origin", "sec-fetch-site", "referer"}.isdisjoint(request.headers)
        person = self._access.may_ask_for_links(request) if request.method == "POST" else None
        if person is None or is_browser:
            raise NotPermitted("links are for who may look at this page", hint="ciuic web --login")
        return document({"path": f"/login?token={self._access.new_link(person)}", "page": self._links})

    async def _log_out(self, asked: Asked) -> Reply:
        return Reply(303, headers=(("location", "/"), ("set-cookie", self._access.log_out(asked.request))))

    # -- pages

    async def _status(self) -> tuple[StatusDocument | None, CiuicError | None]:
        try:
            return decode_json(await self._broker.ask("/status"), StatusDocument), None
        except CiuicError as error:
            return None, error

    async def _actions(self) -> list[Progress]:
        """Return the actions that the broker remembers and that change something, newest first, without what they printed.

        None where it does not answer: snapshots are shown all the same.
        """
        try:
            found = decode_json(await self._broker.ask("/actions"), list[Progress])
        except CiuicError:
            return []
        return [one for one in reversed(found) if one.kind in CHANGES]

    async def _overview(self, asked: Asked) -> Reply:
        status, trouble = await self._status()

        def question(reading: Reading) -> dict[str, Any]:
            infos = reading.infos
            goods = reading.last_goods() if infos else {}
            ordinary = [info for info in infos if not is_safety(info.tags, info.message)]
            incidents = [] if status is None else _open_incidents(status)
            # An incident has a banner of its own, with what to press.
            told = {trainer_key(one.trainer.name, one.trainer.where) for one in incidents[:_MAX_INCIDENTS]}
            alerts = [one for one in (status.alerts if status else []) if one.key not in told]
            emergencies = {one.snapshot for one in incidents}
            verdicts = reading.summaries(
                [*ordinary[:MAX_MARKS], *(info for info in infos if str(info.id) in emergencies)]
            )
            return {
                **self._picture_of(infos, ordinary, verdicts),
                "status": status,
                "trouble": trouble,
                "infos": ordinary[:8],
                "count": len(ordinary),
                "held": sum(info.held for info in infos),
                "goods": sorted(goods.values(), key=lambda good: good.newest.mtime_ns, reverse=True),
                "incidents": [
                    (one, _goods_of(one, goods), verdicts.get(one.snapshot))
                    for one in incidents[:_MAX_INCIDENTS]
                ],
                "alerts": alerts,
                "verdicts": verdicts,
                "changed": lately_changed(
                    self._counts, reading, "1h", most=MAX_PATHS_OF_OVERVIEW, height=110
                ),
            }

        return await self._rendered("overview.html", asked, question)

    def _picture_of(
        self,
        infos: Sequence[SnapshotInfo],
        ordinary: Sequence[SnapshotInfo],
        verdicts: Mapping[str, DatedCheckpoint],
    ) -> dict[str, Any]:
        """Return what the overview draws: the curves as they were read last, or a time line until there are any."""
        drawn = self._drawn
        chart = None if drawn is None else chart_of(drawn.numbers, ())
        return {
            "chart": chart if chart and chart.curves else None,
            "line": timeline_of(ordinary[:MAX_MARKS], verdicts),
            "wants_picture": bool(infos) and not self._is_fresh(_newest(infos)),
        }

    def _is_fresh(self, newest: tuple[int, str]) -> bool:
        """Return whether the numbers that were drawn last are those of today, or too dear to be read again so soon."""
        if self._drawn is None:
            return False
        age = time.monotonic() - self._drawn.at
        return age < _PICTURE_PAUSES * self._drawn.seconds or (
            self._drawn.newest == newest and (not self._drawn.numbers.series or age < _PICTURE_SECONDS)
        )

    async def _picture(self, asked: Asked) -> Reply:
        """Answer with the picture of the overview alone, its curves read now: a page need not wait for them."""
        # One at a time, for all overviews that are open.
        async with self._drawing:
            newest = await self._readers.ask(lambda reading: _newest(reading.infos))
            if not self._is_fresh(newest):
                begun = time.monotonic()
                try:
                    await self._numbers()
                except CiuicError as error:
                    # Not again before there is something new.
                    log.warning("numbers_not_drawn", error=error.message)
                    old = TrainingNumbers(series=(), marks=()) if self._drawn is None else self._drawn.numbers
                    now = time.monotonic()
                    self._drawn = _Drawn(newest, now, now - begun, old)

        def question(reading: Reading) -> dict[str, Any]:
            infos = reading.infos
            ordinary = [info for info in infos if not is_safety(info.tags, info.message)]
            return self._picture_of(infos, ordinary, reading.summaries(ordinary[:MAX_MARKS]))

        return await self._rendered("picture.html", asked, question)

    async def _numbers(self) -> TrainingNumbers:
        """Read the numbers of trainings, for the next overview as well."""
        newest, begun = await self._readers.ask(lambda reading: _newest(reading.infos)), time.monotonic()
        numbers = decode_json(await self._look(TrainingQuestion()), TrainingNumbers)
        now = time.monotonic()
        self._drawn = _Drawn(newest, now, now - begun, numbers)
        return numbers

    async def _drills(self, asked: Asked) -> Reply:
        status, trouble = await self._status()

        def question(reading: Reading) -> dict[str, Any]:
            drills = reading.drills()
            kept = {str(info.id) for info in reading.infos}
            return {
                "status": status,
                "trouble": trouble,
                "drills": drills,
                "standing": standing_drill(drills),
                "kept": kept,
            }

        return await self._rendered("drills.html", asked, question)

    async def _alerts(self, asked: Asked) -> Reply:
        status, trouble = await self._status()
        return self._page("alerts.html", asked.person, {"asked": asked, "status": status, "trouble": trouble})

    async def _hosts(self, asked: Asked) -> Reply:
        return await self._rendered(
            "hosts.html", asked, lambda reading: {"hosts": reading.hosts(), "reports": reading.reports()}
        )

    async def _snapshots(self, asked: Asked) -> Reply:
        def question(reading: Reading) -> dict[str, Any]:
            tag, root, text = asked.get("tag"), asked.get("root"), asked.get("q").casefold()
            with_safety = bool(asked.get("safety"))
            root_bytes = root.encode("utf-8", "surrogateescape")
            infos = reading.infos
            chosen = [
                info
                for info in infos
                if (with_safety or not is_safety(info.tags, info.message))
                and (not tag or tag in info.tags)
                and (not root or root_bytes in info.roots)
                and (not asked.get("h") or info.host == asked.get("h"))
                and (not text or text in f"{info.id} {info.message} {info.host}".casefold())
            ]
            if verdict := asked.get("verdict"):
                judged = reading.summaries(chosen)
                chosen = [
                    info
                    for info in chosen
                    if (one := judged.get(str(info.id))) and one.checkpoint.verdict.state == verdict
                ]
            start = asked.number("from")
            if day := asked.get("day"):
                until_ns = times.parse_when(day, time.time_ns(), end_of_period=True)
                start = next((at for at, one in enumerate(chosen) if one.time_ns <= until_ns), len(chosen))
            return {
                "infos": chosen[start : start + _PAGE_ROWS],
                "verdicts": reading.summaries(chosen[start : start + _PAGE_ROWS]),
                "start": start,
                "rows": _PAGE_ROWS,
                "count": len(chosen),
                "tags": sorted({tag for info in infos for tag in info.tags}),
                "roots": sorted({root for info in infos for root in info.roots}),
                "hosts": sorted({info.host for info in infos}),
            }

        return await self._rendered("snapshots.html", asked, question)

    async def _snapshot(self, asked: Asked) -> Reply:
        def question(reading: Reading) -> dict[str, Any]:
            _, snapshot = reading.snapshot(asked.get("s"))
            return {
                "snapshot": snapshot,
                "checkpoints": reading.stored_checkpoints(snapshot),
                "before": reading.before(snapshot),
                "is_safety": is_safety(snapshot.tags, snapshot.message),
            }

        return await self._rendered("snapshot.html", asked, question)

    async def _files(self, asked: Asked) -> Reply:
        path = (
            asked.path()
            if asked.get("p")
            else await self._readers.ask(lambda reading: reading.top(asked.get("s")))
        )
        tensors, trouble = await self._tensors(asked.get("s"), path) if asked.get("tensors") else (None, None)

        def question(reading: Reading) -> dict[str, Any]:
            start = asked.get("start").encode("utf-8", "surrogateescape")
            after = asked.get("after").encode("utf-8", "surrogateescape")
            try:
                found = reading.listing(asked.get("s"), path, after, start)
            except NotFound:
                # Not there at that time: its versions tell when it was.
                return {"path": path, "listing": None, **self._versions_of(reading, path, asked.get("h"))}
            values: dict[str, Any] = {
                "path": found.path,
                "listing": found,
                "older": reading.before(found.snapshot),
                "newer": reading.after(found.snapshot),
                "judged": {
                    one.checkpoint.path: one.checkpoint.verdict.state
                    for one in reading.stored_checkpoints(found.snapshot)
                },
                "versions": None,
                "lines": None,
                "trouble": trouble,
            }
            if found.entry is not None and not found.entry.is_dir:
                values |= self._versions_of(reading, found.path, found.snapshot.host)
                if found.entry.is_file:
                    values["lines"] = (
                        [line.text for line in reading.preview(found.snapshot.id, found.path)]
                        if tensors is None
                        else tensors.lines
                    )
                    values["may_have_tensors"] = tensors is None and found.path.endswith(SUFFIXES)
                    values["is_image"] = reading.image_kind(found.snapshot.id, found.path) is not None
            return values

        return await self._rendered("files.html", asked, question)

    async def _tensors(self, text: str, path: bytes) -> tuple[Tensors | None, CiuicError | None]:
        question = TensorsQuestion(snapshot=text, path=quote_from_bytes(path))
        try:
            return decode_json(await self._look(question), Tensors), None
        except CiuicError as error:
            return None, error

    async def _versions(self, asked: Asked) -> Reply:
        path = asked.path()
        return await self._rendered(
            "files.html",
            asked,
            lambda reading: {
                "path": path,
                "listing": None,
                **self._versions_of(reading, path, asked.get("h")),
            },
        )

    async def _find(self, asked: Asked) -> Reply:
        pattern = asked.get("pattern").encode("utf-8", "surrogateescape")
        found, trouble = None, None
        if pattern:
            question = FindQuestion(pattern=quote_from_bytes(pattern), deleted=bool(asked.get("deleted")))
            try:
                found = decode_json(await self._look(question), FoundRows)
            except CiuicError as error:
                trouble = error
        values = {"asked": asked, "found": found, "trouble": trouble}
        return self._page("find.html", asked.person, values)

    @staticmethod
    def _versions_of(reading: Reading, path: bytes, host: str) -> dict[str, Any]:
        found, damage = reading.versions(path, host)
        return {"versions": found, "damage": damage, "lines": None, "is_image": False}

    async def _look(self, question: Question) -> bytes:
        """Ask a process of its own. When the browser hangs up, this is cancelled, and the process ends."""
        return await self._broker.ask("/look?" + quote(msgspec.json.encode(question), safe=""))

    async def _compare(self, asked: Asked) -> Reply:
        old, new = asked.get("a"), asked.get("b")
        path = asked.path() if asked.get("p") else b""
        old_path = asked.path("o") if asked.get("o") else b""
        if not old or not new:
            return await self._rendered(
                "compare.html",
                asked,
                lambda reading: {
                    "found": None,
                    "infos": (infos := reading.infos[:_PAGE_ROWS]),
                    "verdicts": reading.summaries(infos),
                    "path": path,
                    "difference": None,
                },
            )
        found = await self._readers.ask(lambda reading: compared(reading, old, new, path, old_path))
        difference, trouble = None, None
        is_file = found.after is not None and found.after.is_file
        if found.can_differ_inside and (is_file or asked.get("tensors")):
            question = CompareQuestion(
                old=str(found.old.id),
                new=str(found.new.id),
                path=quote_from_bytes(found.path),
                old_path=quote_from_bytes(found.old_path),
            )
            try:
                difference = decode_json(await self._look(question), Difference)
            except CiuicError as error:
                trouble = error
        values = {
            "found": found,
            "path": found.path,
            "difference": difference,
            "trouble": trouble,
            "most": MAX_CHANGES,
            "command": f"ciuic diff --tensors {found.old.id} {found.new.id} -p {word(found.path)}",
        }
        return await self._rendered("compare.html", asked, lambda reading: values)

    async def _training(self, asked: Asked) -> Reply:
        try:
            numbers = await self._numbers()
        except CiuicError as error:
            return self._page(
                "training.html", asked.person, {"asked": asked, "trouble": error, "numbers": None}
            )
        chosen = [value for name, value in asked.fields.items() if name.startswith("series")]
        return await self._rendered(
            "training.html",
            asked,
            lambda reading: {
                "trouble": None,
                "numbers": numbers,
                "chart": chart_of(numbers, chosen),
                "pairs": with_before(numbers.marks),
                "value_at": value_at,
            },
        )

    async def _changes(self, asked: Asked) -> Reply:
        def question(reading: Reading) -> dict[str, Any]:
            changed = lately_changed(self._counts, reading, asked.get("since"), most=MAX_PATHS, height=260)
            return {
                "changed": changed,
                "windows": WINDOWS,
                "rows": changed.rows[:MAX_DIRECTORIES],
                "most": MAX_PATHS,
            }

        return await self._rendered("changes.html", asked, question)

    async def _image(self, asked: Asked) -> Reply:
        path = asked.path()
        found = await self._readers.ask(lambda reading: reading.image(asked.get("s"), path))
        if found is None:
            raise UsageError("this is no picture that is shown")
        kind, data = found
        # Of its own: not even a picture that a browser takes for a page may run anything.
        return Reply(200, data, kind, headers=(("content-security-policy", "default-src 'none'; sandbox"),))

    async def _download(self, asked: Asked) -> Reply:
        path = asked.path()
        name = posixpath.basename(path)
        size_bytes = await self._readers.ask(lambda reading: reading.file(asked.get("s"), path).size_bytes)
        plain = "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\%' else "_" for byte in name)
        headers = (
            (
                "content-disposition",
                f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote_from_bytes(name, safe='')}",
            ),
            ("content-security-policy", "default-src 'none'; sandbox"),
            ("content-length", str(size_bytes)),
        )
        lines = self._pieces(asked.get("s"), path, size_bytes)
        return Reply(200, media_type="application/octet-stream", lines=lines, headers=headers)

    async def _pieces(self, text: str, path: bytes, size_bytes: int) -> AsyncGenerator[bytes, None]:
        # Each piece is a question of its own: a slow download holds no thread up.
        for at in range(0, size_bytes, PIECE_BYTES):
            yield await self._readers.ask(
                partial(_piece, text=text, path=path, at=at, length=min(PIECE_BYTES, size_bytes - at))
            )

    async def _log(self, asked: Asked) -> Reply:
        lines = decode_json(await self._broker.ask("/log"), list[LogLine])
        known = {one.action for one in await self._actions()}
        values = {"asked": asked, "lines": lines[::-1][:_MAX_ROWS], "known": known}
        return self._page("log.html", asked.person, values)

    async def _events(self, asked: Asked) -> Reply:
        lines = self._live.lines(asked.request.headers.get("last-event-id", ""))
        return Reply(200, media_type="text/event-stream; charset=utf-8", lines=lines)

    # -- hands

    async def _restore(self, asked: Asked) -> Reply:
        paths = asked.paths()

        def question(reading: Reading) -> dict[str, Any]:
            repository, snapshot = reading.snapshot(asked.get("s"))
            return {
                "snapshot": snapshot,
                "found": [reading.located(repository, snapshot, path) for path in paths],
            }

        return await self._rendered("restore.html", asked, question)

    def _order(self, asked: Asked, kind: str) -> Order:
        try:
            return convert(
                {
                    "kind": kind,
                    "who": asked.person.name,
                    "grant": asked.person.grant.token,
                    "snapshot": asked.get("s"),
                    "paths": [quote_from_bytes(path) for path in asked.paths()]
                    if kind in ("plan", "restore")
                    else [],
                    "dest": quote_from_bytes(asked.path("dest")) if asked.get("dest") else "",
                    "delete": bool(asked.get("delete")),
                    "add_tag": asked.get("add"),
                    "remove_tag": asked.get("remove"),
                    "message": asked.get("message"),
                    "typed": asked.get("typed"),
                    "action": asked.number("n"),
                    "last_good": kind == "plan" and bool(asked.get("good")),
                },
                Order,
            )
        except msgspec.ValidationError as error:
            raise UsageError(f"this cannot be done: {error}") from error

    async def _begin(self, order: Order) -> Progress:
        return decode_json(await self._broker.ask("/actions", msgspec.json.encode(order)), Progress)

    async def _make_plan(self, asked: Asked) -> Reply:
        """Begin a plan: it compares all that is below the path, which may take a while."""
        order = self._order(asked, "plan")
        begun = await self._begin(order)
        fields = {
            "n": begun.action,
            "s": order.snapshot,
            **{f"also{at}": path for at, path in enumerate(order.paths)},
            "destq": order.dest,
            "delete": "1" if order.delete else "",
            "good": asked.get("good"),
        }
        query = urlencode(fields, quote_via=quote)
        # Most are there at once.
        with trio.move_on_after(_PATIENCE_SECONDS):
            async for progress in self._states(begun.action):
                if progress.code is not None:
                    break
        return Reply(303, headers=(("location", f"/plan?{query}"),))

    async def _plan(self, asked: Asked) -> Reply:
        """Show what a restore would do; the form below it asks for the name of what is written."""
        paths = asked.paths()
        progress = await self._now(asked.number("n"))
        if progress.words != shown_words(words_of(self._order(asked, "plan"))):
            raise UsageError("this is not the plan of that restore", hint="ask for the plan again")

        def question(reading: Reading) -> dict[str, Any]:
            document = progress.document or {}
            chosen = document.get("last_good", {}).get("snapshot") or asked.get("s")
            repository, snapshot = reading.snapshot(chosen)
            plan = document.get("plan")
            return {
                "snapshot": snapshot,
                "paths": [reading.located(repository, snapshot, path).path for path in paths],
                "above": (asked.path("dest") if asked.get("dest") else b"") or posixpath.commonpath(paths),
                "delete": bool(asked.get("delete")),
                "dest": asked.path("dest") if asked.get("dest") else b"",
                "progress": progress,
                "plan": plan,
                "has_room": plan is not None and all(room["enough"] for room in plan["room"]),
            }

        return await self._rendered("plan.html", asked, question)

    async def _states(self, number: int) -> AsyncGenerator[Progress, None]:
        rest = b""
        async with aclosing(self._broker.stream(f"/actions/{number}")) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield decode_json(line, Progress)

    async def _act(self, asked: Asked) -> Reply:
        """Begin an action that changes something."""
        kind = asked.get("kind")
        if kind not in CHANGES and kind != "stop":
            raise UsageError("there is no such action")
        begun = await self._begin(self._order(asked, kind))
        return Reply(303, headers=(("location", f"/action?n={begun.action}"),))

    async def _action(self, asked: Asked) -> Reply:
        progress = await self._now(asked.number("n"))
        safety = str((progress.document or {}).get("safety_snapshot") or "")
        if not safety and progress.code and progress.kind in ("restore", "undo"):
            # One that was killed has not said which one it took.
            safety = await self._readers.ask(lambda reading: reading.safety_since(progress.began_ns))
        return self._page(
            "action.html", asked.person, {"asked": asked, "progress": progress, "safety": safety}
        )

    async def _now(self, number: int) -> Progress:
        """Return how far an action is. Raises NotFound."""
        async with aclosing(self._states(number)) as states:
            async for progress in states:
                return progress
        raise NotFound(f"there is no action {number}")

    async def _action_events(self, asked: Asked) -> Reply:
        # An action that there is not is refused, before a stream has begun.
        await self._action(asked)
        return Reply(
            200, media_type="text/event-stream; charset=utf-8", lines=self._action_lines(asked.number("n"))
        )

    async def _action_lines(self, number: int) -> AsyncGenerator[bytes, None]:
        # A stream that ends is asked for again by the browser.
        with suppress(CiuicError):
            async with aclosing(self._states(number)) as states:
                async for progress in states:
                    kind = b"progress" if progress.code is None else b"end"
                    yield b"event: %s\ndata: %s\n\n" % (kind, msgspec.json.encode(progress))


def _current(actions: Sequence[Progress]) -> list[Progress]:
    since = time.time_ns() - _ENDED_SECONDS * 10**9
    chosen = [
        one
        for one in actions
        if one.code is None or (one.kind in ("restore", "undo") and one.ended_ns >= since)
    ]
    return sorted(chosen, key=lambda one: one.code is not None)[:_MAX_ACTIONS]


def _newest(infos: Sequence[SnapshotInfo]) -> tuple[int, str]:
    return len(infos), str(infos[0].id) if infos else ""


def _piece(reading: Reading, *, text: str, path: bytes, at: int, length: int) -> bytes:
    return reading.file(text, path).read(at, length)


def _goods_of(incident: Incident, goods: Mapping[bytes, LastGoodCheckpoint]) -> list[LastGoodCheckpoint]:
    """Return the last good checkpoints that may be of this training: of the root that it works in, otherwise of each."""
    where = incident.trainer.where.encode("utf-8", "surrogateescape")
    own = [good for root, good in goods.items() if where and is_within(where, root)]
    return own or [goods[root] for root in sorted(goods)]


def _open_incidents(status: StatusDocument) -> list[Incident]:
    """Return the incidents of the last day, newest first, of trainings that neither went on nor were started again since."""
    # Registered anew: ranks that merely outlive another one were there before.
    started: dict[str, float] = {}
    for trainer in status.trainers:
        key = trainer_key(trainer.name, trainer.where)
        started[key] = max(started.get(key, 0.0), _seconds(trainer.since))
    found: list[Incident] = []
    settled: set[str] = set()
    # One that hung and died is dead.
    ended: set[str] = set()
    for one in status.incidents:
        key, at = trainer_key(one.trainer.name, one.trainer.where), _seconds(one.time)
        if one.kind == "recovered":
            settled.add(key)
        elif (
            key not in settled
            and not (one.kind == "hung" and key in ended)
            and at >= max(started.get(key, 0.0), time.time() - _INCIDENT_SECONDS)
        ):
            found.append(one)
            ended.add(key)
    return found


def _seconds(text: str) -> float:
    """Return an instant of the daemon's; 0 for what is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _fields(request: Request) -> dict[str, str]:
    try:
        return dict(
            field
            for text in (request.query, request.body.decode("latin-1"))
            for field in parse_qsl(
                text,
                keep_blank_values=True,
                encoding="utf-8",
                errors="surrogateescape",
                max_num_fields=_MAX_FIELDS,
            )
        )
    except ValueError as error:
        raise UsageError("the request has too many fields") from error


# -- templates


def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "size": human_size,
        "duration": human_duration,
        "clock": times.clock,
        "clock_of": times.clock_of,
        "shown": one_line,
        "below": join,
        "bytes_of": size_of,
        "q": _quoted,
        "unquoted": unquote_to_bytes,
        "base": last_name,
        "plural": plural,
        "kind": _kind,
        "mode": stat.filemode,
        "steps": _steps,
    }
    made.globals |= {"ago": _ago, "ago_of": _ago_of, "zone": _zone, "fact_tags": FACT_TAGS}
    # Compiled now, and not at the first page of each kind.
    for name in made.list_templates():
        made.get_template(name)
    return made


def _quoted(value: bytes | str) -> str:
    return (
        quote_from_bytes(value, safe="/")
        if isinstance(value, bytes)
        else quote(value, safe="/", errors="surrogateescape")
    )


def _kind(mode: int) -> str:
    return {stat.S_IFDIR: "directory", stat.S_IFLNK: "link", stat.S_IFREG: "file"}.get(
        stat.S_IFMT(mode), "special"
    )


def _steps(path: bytes) -> list[tuple[bytes, bytes]]:
    """Return (path, name) of each directory above a path, and of the path."""
    parts = [part for part in path.split(b"/") if part]
    return [(b"/" + b"/".join(parts[: at + 1]), part) for at, part in enumerate(parts)]


def _ago_of(text: str) -> str:
    try:
        return _ago(int(datetime.fromisoformat(text).timestamp() * 10**9))
    except ValueError:
        return ""


def _zone() -> str:
    """Return the zone of the times on the page, as ``UTC+02:00``."""
    offset = time.strftime("%z")
    return "UTC" if offset == "+0000" else f"UTC{offset[:3]}:{offset[3:]}"


def _ago(time_ns: int) -> str:
    seconds = (time.time_ns() - time_ns) / 10**9
    return f"{human_duration(seconds)} ago" if seconds >= 0 else f"in {human_duration(-seconds)}"
