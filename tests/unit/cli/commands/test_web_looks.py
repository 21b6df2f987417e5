"""Questions of the page that take long, in processes of their own: bounded in number and time, and ended when nobody waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from support.site import ended
from support.until import until

from ciuic.cli.commands.web import looks
from ciuic.cli.commands.web.broker import question_of
from ciuic.cli.commands.web.jobs import CompareQuestion, FrontJob, TrainingQuestion
from ciuic.errors import Busy, CiuicError, UsageError

_JOB = FrontJob(sockets=(), broker="", host="h")
_QUESTION = TrainingQuestion()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Each look is a shell that makes this file, and waits for ever."""
    mark = tmp_path / "pid"
    script = f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 1000"
    monkeypatch.setattr(looks, "module_command", lambda module: ["/bin/sh", "-c", script])
    return mark


async def _pid(mark: Path) -> int:
    await trio.to_thread.run_sync(until, "the process", mark.exists)
    return int(await trio.Path(mark).read_text())


def test_a_look_ends_when_nobody_waits(begun: Path) -> None:
    """A question whose asker has gone leaves no process behind."""

    async def main() -> None:
        asked = looks.Looks(_JOB, {})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.reply, _QUESTION)
            pid = await _pid(begun)
            assert not ended(pid)
            nursery.cancel_scope.cancel()
        assert ended(pid)

    trio.run(main)


def test_a_look_has_a_limit_of_time(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that takes too long is given up with a sentence, and its process ends."""
    monkeypatch.setattr(looks, "MAX_SECONDS", 0.2)

    async def main() -> None:
        with pytest.raises(CiuicError, match="takes longer than"):
            await looks.Looks(_JOB, {}).reply(_QUESTION)

    trio.run(main)
    assert not begun.exists() or ended(int(begun.read_text()))


def test_few_looks_run_at_once(begun: Path) -> None:
    """Further questions are refused at once, and taken again when an earlier one has ended."""

    async def main() -> None:
        asked = looks.Looks(_JOB, {})
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(asked.reply, _QUESTION)
            await _pid(begun)
            with pytest.raises(Busy):
                await asked.reply(_QUESTION)
            nursery.cancel_scope.cancel()
        await trio.Path(begun).unlink()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.reply, _QUESTION)
            await _pid(begun)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_look_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends without an answer, as one that a limit has killed, is told as that."""
    monkeypatch.setattr(looks, "module_command", lambda module: ["/bin/sh", "-c", "read line; kill -9 $$"])

    async def main() -> None:
        with pytest.raises(CiuicError, match="was given up"):
            await looks.Looks(_JOB, {}).reply(_QUESTION)

    trio.run(main)


@pytest.mark.parametrize(
    ("old", "path"),
    [("latest; rm", "/p"), ("cs-1", "/a/../b"), ("cs-a1b2c3", "relative"), ("cs-a1b2c3", "/%00")],
)
def test_questions_are_checked(old: str, path: str) -> None:
    """The broker starts nothing for what is no id of a snapshot or no absolute path."""
    from urllib.parse import quote

    import msgspec

    question = CompareQuestion(old=old, new="cs-a1b2c3", path=path, old_path=path)
    with pytest.raises(UsageError):
        question_of(quote(msgspec.json.encode(question), safe=""))
    with pytest.raises(UsageError):
        question_of("%7B%22type%22%3A%22other%22%7D")
