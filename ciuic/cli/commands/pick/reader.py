"""Reader of a repository in a thread of its own, for a screen that must never wait.

Guarantees: everything that is asked of the repository or remote is asked in this one thread, which opens it: a `Repository` is for one
thread. A question replaces the one of its kind that is still being answered, and a newer question of another kind is answered in the
middle of an older one, so that a long search does not keep the screen from anything. Answers come in batches. `end` never waits for a
store that does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import click

from ciuic.cli.shared.session import Session
from ciuic.history import Timeline
from ciuic.repository import Repository
from ciuic.types import RootRecord, Snapshot

_BATCH_SECONDS: Final = 0.03
"""Time after which what was found so far is told: the next frame can show it."""
_END_SECONDS: Final = 0.3
"""Time within which a thread that is not held up by a disk or a store ends."""


class Stopped(Exception):
    """The question was replaced, or the program ends."""


class Answer(NamedTuple):
    """A part of the answer to a question."""

    kind: str
    number: int
    """Number of the question: an answer to a replaced one may still be under way."""
    items: list[Any]
    is_last: bool
    error: Exception | None


Work = Callable[["Question"], Iterator[Any]]


class Question:
    """A question to the repository; its work yields the answer."""

    def __init__(self, reader: Reader, kind: str, number: int, work: Work) -> None:
        self.kind = kind
        self.number = number
        self.work = work
        self.is_stopped = False
        self._reader = reader

    def pause(self) -> None:
        """Answer newer questions in between. Raises `Stopped` if this one was replaced."""
        self._reader.pause(self)

    def watched(self, timeline: Timeline) -> Timeline:
        """Return the timeline, in which each snapshot that is looked at is a pause."""
        return _WatchedTimeline(timeline, self.pause)


class _WatchedTimeline(Timeline):
    def __init__(self, timeline: Timeline, pause: Callable[[], None]) -> None:
        super().__init__(timeline.host, timeline.path, timeline.snapshots)
        self._pause = pause

    def root_of(self, snapshot: Snapshot) -> RootRecord:
        self._pause()
        return super().root_of(snapshot)


class Place(NamedTuple):
    """A root of a host in a repository."""

    repository: Repository
    timeline: Timeline


class Reader:
    """Thread that answers questions.

    Args:
        context: Context of the command, whose session is used in the thread alone.
    """

    def __init__(self, context: click.Context) -> None:
        self._context = context
        self.session: Session = context.ensure_object(Session)
        self._condition = threading.Condition()
        self._waiting: list[Question] = []
        self._current: dict[str, Question] = {}
        self._running: set[str] = set()
        self._is_ending = False
        self._count = 0
        self.tell: Callable[[Answer], None] = lambda answer: None
        """Receives answers, in the thread."""
        # A daemon thread: one that a store holds up must not keep the process.
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self, kind: str, work: Work) -> int:
        """Ask a question in place of the one of this kind, and return its number."""
        with self._condition:
            self._stop(kind)
            self._count += 1
            question = Question(self, kind, self._count, work)
            self._current[kind] = question
            self._waiting.append(question)
            self._condition.notify()
            return self._count

    def drop(self, kind: str) -> None:
        """Answer the question of this kind no further."""
        with self._condition:
            self._stop(kind)

    def _stop(self, kind: str) -> None:
        old = self._current.pop(kind, None)
        if old is not None:
            old.is_stopped = True
            if old in self._waiting:
                self._waiting.remove(old)

    def is_current(self, answer: Answer) -> bool:
        """Return whether this is an answer to the newest question of its kind."""
        with self._condition:
            question = self._current.get(answer.kind)
            return question is not None and question.number == answer.number

    def is_done(self, answer: Answer) -> None:
        """Note that the last part of an answer has arrived."""
        with self._condition:
            question = self._current.get(answer.kind)
            if question is not None and question.number == answer.number:
                del self._current[answer.kind]

    @property
    def is_busy(self) -> bool:
        """True while a question is not answered."""
        with self._condition:
            return bool(self._current)

    def end(self) -> bool:
        """Stop everything, close the session in its thread, and return whether the thread has ended."""
        with self._condition:
            self._is_ending = True
            for kind in list(self._current):
                self._stop(kind)
            self._condition.notify()
        self._thread.join(_END_SECONDS)
        return not self._thread.is_alive()

    def pause(self, question: Question) -> None:
        """Answer newer questions of other kinds. Raises `Stopped` if this one was replaced."""
        while True:
            if question.is_stopped:
                raise Stopped
            if not self._waiting:
                return
            with self._condition:
                newer = self._next()
            if newer is None:
                return
            self._answer(newer)

    def _next(self) -> Question | None:
        """Take the newest question that waits, of no kind that is in the middle of an answer."""
        for question in reversed(self._waiting):
            if question.kind not in self._running:
                self._waiting.remove(question)
                return question
        return None

    def _run(self) -> None:
        with self._context.scope(cleanup=False):
            while True:
                with self._condition:
                    while not self._is_ending and (question := self._next()) is None:
                        self._condition.wait()
                    if self._is_ending:
                        break
                assert question is not None
                self._answer(question)
            # What was opened in this thread is closed here.
            self.session.close()

    def _answer(self, question: Question) -> None:
        self._running.add(question.kind)
        items: list[Any] = []
        error: Exception | None = None
        told = time.monotonic()
        try:
            for item in question.work(question):
                items.append(item)
                now = time.monotonic()
                if now - told >= _BATCH_SECONDS:
                    self.tell(Answer(question.kind, question.number, items, False, None))
                    items, told = [], now
                    question.pause()
        except Stopped:
            return
        except Exception as raised:
            error = raised
        finally:
            self._running.discard(question.kind)
        if not question.is_stopped:
            self.tell(Answer(question.kind, question.number, items, True, error))
