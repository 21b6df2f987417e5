"""Actions on this host, in the process that has the privileges for them.

The process that faces browsers (`front.py`) can read snapshots and nothing else. It asks this one, over a Unix socket that only it may
use, for the daemon's status and events, and, where `web.actions` says so, for actions: each is one run of ``ciuic`` with words that this
module chooses, so that the page can do what a command can, and a command says what the page did.

Guarantees: an action is in the log, durably, before it begins and with its outcome after it; one that was begun is carried out to its end
whatever becomes of the page. Not more than `_MAX_ACTIONS` run at once.
"""

from __future__ import annotations

import os
import posixpath
import signal
import subprocess
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote_to_bytes

import msgspec
import structlog
import trio

from ciuic.cli.commands.web.access import Grants
from ciuic.cli.commands.web.jobs import CompareQuestion, Question
from ciuic.cli.commands.web.live import SocketClient
from ciuic.cli.commands.web.looks import Looks
from ciuic.cli.commands.web.rights import ACTIONS, TYPED
from ciuic.errors import Busy, CiuicError, NotPermitted, Unreachable, UsageError
from ciuic.printable import one_line
from ciuic.protocol.control import ControlClient
from ciuic.protocol.control_types import rfc3339
from ciuic.protocol.http_server import Reply, Request, document, refusal
from ciuic.structs import decode_json
from ciuic.system.child_process import environment
from ciuic.system.disk import APPEND_FILE, Disk
from ciuic.system.shell_quoting import word
from ciuic.types import SnapshotId

Kind = Literal["plan", "restore", "undo", "snapshot", "hold", "release", "tag", "forget", "drill", "stop"]
CHANGES: Final = frozenset({"restore", "undo", "snapshot", "hold", "release", "tag", "forget", "drill"})
"""Actions that change something, if only what is known of it, and are in the log."""
_MAX_ACTIONS: Final = 8
_STATUS_SECONDS: Final = 1.5
_MAX_OUTPUT_BYTES: Final = 256 << 20
_MAX_TEXT: Final = 1000
_MAX_DIGITS: Final = 16
MAX_PATHS: Final = 100
"""Paths of one restore."""
_MAX_ITEMS: Final = 500
"""Paths of a plan that the page shows."""
_LOG_NAME: Final = "actions.log"
_MAX_LOG_BYTES: Final = 16 << 20
_MAX_KEPT: Final = 100
"""Actions that have ended and can still be looked at."""
log = structlog.get_logger(__name__)


class Order(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Something that a person wants done."""

    kind: Kind
    who: str
    grant: str = ""
    """Token of the grant by which it is wanted."""
    snapshot: str = ""
    paths: tuple[str, ...] = ()
    """Paths to restore, percent-encoded."""
    dest: str = ""
    """Directory that gets them, encoded likewise; empty to put them in their places, over what is there."""
    delete: bool = False
    """Below these paths what the snapshot does not have is removed, too."""
    add_tag: str = ""
    remove_tag: str = ""
    message: str = ""
    typed: str = ""
    """Confirmation that the person typed (`to_be_typed`)."""
    action: int = 0
    """Number of the action to stop."""
    last_good: bool = False
    """Plan only: use the newest snapshot whose newest checkpoint below the path is GOOD, instead of ``snapshot``."""


class LogLine(msgspec.Struct, kw_only=True):
    """Line of the log of actions."""

    time: str
    who: str
    what: str
    """Words of the command."""
    action: int
    outcome: str = "begun"
    """begun, done, or why it failed."""


class ActionLog:
    """Log of what the page has done, one JSON document a line.

    Args:
        directory: Where it is; made if missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def path(self) -> Path:
        """The newest file; the one before it has ``.1`` behind its name."""
        return self._directory / _LOG_NAME

    def add(self, line: LogLine) -> None:
        """Append a line, which is durable on return. OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not self.path.exists()
        if not is_new and self.path.stat().st_size > _MAX_LOG_BYTES:
            os.replace(self.path, self.path.with_name(f"{_LOG_NAME}.1"))
            is_new = True
        fd = os.open(self.path, APPEND_FILE, 0o600)
        try:
            # A line that a crash has cut short has no end.
            os.write(fd, b"\n" * self._is_cut_short() + msgspec.json.encode(line) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            Disk().sync_dir(str(self._directory))

    def _is_cut_short(self) -> bool:
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            return file.read(1) not in (b"", b"\n")

    def lines(self) -> list[LogLine]:
        """Return all lines, oldest first; one that a crash has cut short is left out."""
        found: list[LogLine] = []
        for path in (self.path.with_name(f"{_LOG_NAME}.1"), self.path):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            for line in data.splitlines():
                try:
                    found.append(decode_json(line, LogLine))
                except msgspec.DecodeError:
                    continue
        return found


def words_of(order: Order) -> list[str | bytes]:
    """Return the words of the command that does what is wanted.

    Raises:
        UsageError: something in the order is not what it can be.
    """
    if order.kind == "snapshot":
        _check_text(order.message)
        return ["snapshot", "--wait", "--json", f"--message={order.message}"]
    if order.kind == "drill":
        return ["drill", "--json"]
    is_plan = order.kind == "plan"
    id_ = "" if is_plan and order.last_good else str(_id(order.snapshot))
    if order.kind in ("plan", "restore"):
        which = f"--snapshot={id_}" if id_ else "--last-good"
        beside = [b"--dest=" + _path(order.dest)] if order.dest else ["--overwrite=always"]
        # Newer checkpoints that go are in the plan, which has been confirmed.
        delete = ["--delete", *([] if is_plan else ["--yes"])] if order.delete else []
        last = ["--plan"] if is_plan else []
        paths = [b"--path=" + path for path in _paths(order)]
        return ["restore", which, *paths, *beside, *delete, *last, "--json"]
    if order.kind == "undo":
        return ["undo", id_, "--json"]
    if order.kind == "hold":
        _check_text(order.message)
        return ["hold", id_, f"--message={order.message or f'by {order.who}'}", "--json"]
    if order.kind == "tag":
        changes = [("--add", order.add_tag), ("--remove", order.remove_tag)]
        for _, tag in changes:
            _check_text(tag)
        return ["tag", id_, *(f"{option}={tag}" for option, tag in changes if tag), "--json"]
    if order.kind == "release":
        return ["release", id_, "--json"]
    if order.kind == "forget":
        return ["forget", id_, "--yes", "--json"]
    raise UsageError(f"{order.kind} is no command")


def to_be_typed(order: Order) -> str:
    """Return what a person types to confirm what overwrites or deletes; empty where nothing has to be (`rights.TYPED`)."""
    if order.kind == "restore":
        return last_name(_path(order.dest) if order.dest else posixpath.commonpath(_paths(order)))
    return order.snapshot if order.kind in TYPED else ""


def last_name(path: bytes) -> str:
    """Return the last name of a path, on one line."""
    return one_line(posixpath.basename(path.rstrip(b"/")) or b"/")


def shown_words(words: list[str | bytes]) -> str:
    """Return the command as a shell takes it."""
    return " ".join(word(os.fsencode(one)) for one in ("ciuic", *words))


def _id(text: str) -> SnapshotId:
    try:
        return SnapshotId.parse(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no id of a snapshot") from error


def _check_text(text: str) -> None:
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise UsageError(f"a message is one line of at most {_MAX_TEXT:,} characters")


def _paths(order: Order) -> list[bytes]:
    if not 0 < len(order.paths) <= MAX_PATHS:
        raise UsageError(f"a restore is of 1 to {MAX_PATHS} paths, and this one of {len(order.paths)}")
    return [_path(one) for one in order.paths]


def _path(text: str) -> bytes:
    path = unquote_to_bytes(text)
    if not path.startswith(b"/") or b"\0" in path or not {b".", b".."}.isdisjoint(path.split(b"/")):
        raise UsageError("a path is absolute, and has no NUL, . or ..")
    return path


def question_of(text: str) -> Question:
    """Return the question in the query of a request. Raises UsageError."""
    try:
        question: Question = decode_json(unquote_to_bytes(text), Question)
    except msgspec.DecodeError as error:
        raise UsageError(f"the question cannot be read: {error}") from error
    if isinstance(question, CompareQuestion):
        for id_, path in ((question.old, question.old_path), (question.new, question.path)):
            _id(id_)
            _path(path)
    return question


class Progress(msgspec.Struct, kw_only=True):
    """State of an action, as it is told while it runs and at its end."""

    action: int
    kind: Kind
    who: str
    words: str = ""
    """The command, as a shell would take it."""
    state: dict[str, Any] = {}
    """Latest line of progress of the command (docs/cli.md, CIUIC_PROGRESS)."""
    code: int | None = None
    """Exit code; None while it runs."""
    document: dict[str, Any] | None = None
    """JSON document that the command printed."""
    said: str = ""
    """Text of its stderr, without progress."""
    began_ns: int = 0
    ended_ns: int = 0
    """0 while it runs."""

    @property
    def share(self) -> float | None:
        """Part that is done, of the bytes; None while it is not known."""
        done, total = self._number("bytes_done"), self._number("bytes_total")
        return min(1.0, done / total) if total > 0 else None

    @property
    def bytes_per_second(self) -> float:
        """Mean rate since it began."""
        seconds = self._number("elapsed_seconds")
        return self._number("bytes_done") / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time that the rest takes at this rate; None while that is not known."""
        left = self._number("seconds_left")
        if left or not self.share:
            return left or None
        return self._number("elapsed_seconds") * (1 - self.share) / self.share

    def _number(self, key: str) -> float:
        value = self.state.get(key)
        return float(value) if isinstance(value, int | float) and 0 <= value < 2**63 else 0.0


class Action:
    """A command that runs, or has run."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.process: trio.Process | None = None
        self._changed = trio.Event()

    def summary(self) -> Progress:
        """Return the progress without what the command printed, but for the snapshot that takes it back."""
        safety = (self.progress.document or {}).get("safety_snapshot")
        return msgspec.structs.replace(
            self.progress, document={"safety_snapshot": safety} if safety else None, said=""
        )

    def change(self) -> None:
        """Tell those who watch that the progress is another."""
        self._changed.set()
        self._changed = trio.Event()

    async def states(self) -> AsyncGenerator[Progress, None]:
        """Yield the progress, and again whenever it has changed, until the end."""
        while True:
            changed = self._changed
            yield self.progress
            if self.progress.code is not None:
                return
            await changed.wait()


class Broker:
    """Resources of the broker; see `ciuic.protocol.http_server`.

    Args:
        control: Path of the daemon's control socket.
        command: Words before those of an action: the interpreter, ciuic and its global options.
        may_act: Actions that change something are carried out.
        log: Log of them.
        looks: Answers questions that take long.
        grants: Grants that orders need.
        nursery: Nursery in which they run, which nobody's hanging up ends.
    """

    def __init__(
        self,
        control: Path,
        command: list[str],
        *,
        may_act: bool,
        log: ActionLog,
        looks: Looks,
        grants: Grants,
        nursery: trio.Nursery,
    ) -> None:
        self._control = control
        self._command = command
        self._may_act = may_act
        self._log = log
        self._looks = looks
        self._grants = grants
        self._nursery = nursery
        self._actions: dict[int, Action] = {}
        # Not from 0: an action of the log that this process did not run must not get the number of one that it did.
        self._count = int(time.time())

    async def answer(self, request: Request) -> Reply:
        """Answer a request of the front. Raises nothing but cancellation."""
        try:
            return await self._answer(request)
        except CiuicError as error:
            return refusal(error)
        except OSError as error:
            return refusal(CiuicError(f"the log of actions cannot be used: {error.strerror}"))

    async def _answer(self, request: Request) -> Reply:
        if (request.method, request.path) == ("GET", "/status"):
            return document(await trio.to_thread.run_sync(self._status))
        if (request.method, request.path) == ("GET", "/events"):
            return Reply(200, media_type="text/event-stream", lines=self._events())
        if (request.method, request.path) == ("GET", "/log"):
            return document(await trio.to_thread.run_sync(self._log.lines))
        if (request.method, request.path) == ("GET", "/actions"):
            return document([one.summary() for one in self._actions.values()])
        if (request.method, request.path) == ("GET", "/look"):
            return await self._looks.reply(question_of(request.query))
        if (request.method, request.path) == ("POST", "/actions"):
            return document((await self._begin(request.body)).progress, 202)
        head, _, number = request.path.rpartition("/")
        if (
            request.method == "GET"
            and head == "/actions"
            and number.isascii()
            and number.isdigit()
            and len(number) < _MAX_DIGITS
        ):
            action = self._actions.get(int(number))
            if action is not None:
                return Reply(200, media_type="application/x-ndjson", lines=_lines(action))
        return refusal(UsageError(f"there is no {request.path}"))

    def _status(self) -> object:
        # A page must come although the daemon hangs.
        with ControlClient(self._control, timeout_seconds=_STATUS_SECONDS) as client:
            return client.status()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield what the daemon's stream of events sends; it ends with the daemon's."""
        with suppress(Unreachable):
            async with aclosing(SocketClient(os.fspath(self._control)).stream("/v1/events")) as pieces:
                async for piece in pieces:
                    yield piece

    async def _begin(self, body: bytes) -> Action:
        try:
            order = decode_json(body, Order)
        except msgspec.DecodeError as error:
            raise UsageError(f"the order cannot be read: {error}") from error
        # A proxy alone says who calls.
        order.who = self._grants.check(order.grant, ACTIONS[order.kind]).name or order.who
        if order.kind == "stop":
            return await self._stop(order)
        words = words_of(order)
        if order.kind in CHANGES and not self._may_act:
            raise NotPermitted(
                "this page only shows: it may change nothing", hint="actions = true in the table [web]"
            )
        needed = to_be_typed(order)
        # Blanks around it are easily typed, and easily left out where the name has them.
        if needed and (order.typed.strip() or order.typed) != (needed.strip() or needed):
            raise UsageError(f"to confirm, type {needed}", hint="go back, and type it as it stands there")
        if sum(one.progress.code is None for one in self._actions.values()) >= _MAX_ACTIONS:
            raise Busy(f"{_MAX_ACTIONS} actions run already", hint="wait for one of them to end")
        self._count += 1
        action = Action(
            Progress(
                action=self._count,
                kind=order.kind,
                who=order.who,
                words=shown_words(words),
                began_ns=time.time_ns(),
            )
        )
        if order.kind in CHANGES:
            await trio.to_thread.run_sync(self._note, action, "begun")
        self._actions[self._count] = action
        for number in list(self._actions)[:-_MAX_KEPT]:
            if self._actions[number].progress.code is not None:
                del self._actions[number]
        self._nursery.start_soon(self._run, action, words)
        return action

    async def _stop(self, order: Order) -> Action:
        """Interrupt an action, as ^C does in a terminal; what has ended stays as it is."""
        action = self._actions.get(order.action)
        if action is None:
            raise UsageError(f"there is no action {order.action}")
        self._grants.check(order.grant, ACTIONS[action.progress.kind])
        if action.progress.code is None and action.process is not None:
            if action.progress.kind in CHANGES:
                await trio.to_thread.run_sync(self._note, action, "to be stopped", order.who)
            action.process.send_signal(signal.SIGINT)
        return action

    def _note(self, action: Action, outcome: str, who: str = "") -> None:
        one = action.progress
        self._log.add(
            LogLine(
                time=rfc3339(time.time_ns()),
                who=who or one.who,
                what=one.words,
                action=one.action,
                outcome=outcome,
            )
        )

    async def _run(self, action: Action, words: list[str | bytes]) -> None:
        progress = action.progress
        out, said = bytearray(), bytearray()
        try:
            process = await trio.lowlevel.open_process(
                [*self._command, *map(os.fsdecode, words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment(), "CIUIC_PROGRESS": "json"},
                cwd="/",
                start_new_session=True,
            )
            action.process = process
            async with trio.open_nursery() as reading:
                reading.start_soon(_collect, process.stdout, out)
                reading.start_soon(self._follow, process.stderr, action, said)
            code = await process.wait()
        except OSError as error:
            code, said = 1, bytearray(f"the command cannot be started: {error.strerror}".encode())
        progress.said = said.decode("utf-8", "backslashreplace").strip()
        try:
            progress.document = _shortened(decode_json(bytes(out), dict[str, Any])) if out else None
        except msgspec.DecodeError:
            progress.document = None
        progress.code, progress.ended_ns = code, time.time_ns()
        if progress.kind in CHANGES:
            try:
                await trio.to_thread.run_sync(self._note, action, "done" if not code else f"exit code {code}")
            except OSError as error:
                log.error("outcome_not_logged", action=progress.action, error=str(error))
        action.change()

    async def _follow(self, stream: Any, action: Action, said: bytearray) -> None:
        """Take progress from the lines of stderr; other lines are for the person."""
        rest = b""
        async for data in stream:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    action.progress.state = decode_json(line, dict[str, Any])
                    action.change()
                except msgspec.DecodeError:
                    if len(said) < _MAX_OUTPUT_BYTES:
                        said += line + b"\n"
            rest = rest[-_MAX_OUTPUT_BYTES:]
        said += rest


def _shortened(document: dict[str, Any]) -> dict[str, Any]:
    """Leave of the paths in a plan those that would change, as many as the page shows, and their number."""
    if len(restores := document.pop("restores", ())) == 1:
        # Of `restore --last-good`: the document of the restore, beside which snapshot was chosen.
        document |= {**restores[0], "last_good": document["last_good"][0]}
    items = document.get("items")
    if isinstance(items, list):
        changing = [item for item in items if isinstance(item, dict) and item.get("action") != "skipped"]
        document["items"], document["changing"] = changing[:_MAX_ITEMS], len(changing)
    return document


async def _collect(stream: Any, out: bytearray) -> None:
    async for data in stream:
        if len(out) < _MAX_OUTPUT_BYTES:
            out += data


async def _lines(action: Action) -> AsyncGenerator[bytes, None]:
    async with aclosing(action.states()) as states:
        async for progress in states:
            yield msgspec.json.encode(progress) + b"\n"
