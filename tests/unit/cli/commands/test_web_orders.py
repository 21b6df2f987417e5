"""Orders of the page: the commands that they become, what is refused, and the log of what was done."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.cli.commands.web import broker
from ciuic.cli.commands.web.broker import Action, ActionLog, LogLine, Order, Progress, to_be_typed, words_of
from ciuic.cli.commands.web.rights import ACTIONS, TYPED
from ciuic.errors import UsageError

_NAMES = st.binary(min_size=1, max_size=20).map(lambda name: name.replace(b"/", b"-").replace(b"\0", b"0"))


@given(st.lists(_NAMES.filter(lambda name: name not in (b".", b"..")), max_size=4))
def test_a_path_is_one_word_and_never_an_option(names: list[bytes]) -> None:
    """Whatever a path has in it, it is the value of --path, byte by byte."""
    path = b"/" + b"/".join(names)
    words = words_of(Order(kind="restore", who="a", snapshot="cs-abcdef", paths=(quote_from_bytes(path),)))
    assert words == ["restore", "--snapshot=cs-abcdef", b"--path=" + path, "--overwrite=always", "--json"]


@pytest.mark.parametrize(
    "order",
    [
        Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("relative",)),
        Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/a/%2E%2e/b",)),
        Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/a%00b",)),
        Order(kind="restore", who="a", snapshot="--help", paths=("/a",)),
        Order(kind="restore", who="a", snapshot="latest", paths=("/a",)),
        Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/a",), dest="b"),
        Order(kind="restore", who="a", snapshot="cs-abcdef"),
        Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/a",) * 101),
        Order(kind="tag", who="a", snapshot="cs-abcdef", add_tag="two\nlines"),
        Order(kind="forget", who="a", snapshot="--all"),
        Order(kind="undo", who="a"),
        Order(kind="snapshot", who="a", message="two\nlines"),
        Order(kind="hold", who="a", snapshot="cs-abcdef", message="x" * 1001),
    ],
)
def test_what_is_no_order_is_refused(order: Order) -> None:
    """Ids are whole ids, paths absolute and without steps up, messages one line."""
    with pytest.raises(UsageError):
        words_of(order)


@pytest.mark.parametrize(
    ("order", "typed"),
    [
        (Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/home/anna/a%0Ab",)), r"a\nb"),
        (Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/a",), dest="/etc/cron.d/"), "cron.d"),
        (Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/",)), "/"),
        (Order(kind="restore", who="a", snapshot="cs-abcdef", paths=("/run/a", "/run/b/c")), "run"),
        (Order(kind="undo", who="a", snapshot="cs-abcdef"), "cs-abcdef"),
        (Order(kind="forget", who="a", snapshot="cs-abcdef"), "cs-abcdef"),
        *(
            (Order(kind=kind, who="a", snapshot="cs-abcdef", paths=("/a",)), "")
            for kind in ACTIONS.keys() - TYPED.keys()
        ),
    ],
)
def test_what_overwrites_or_deletes_is_typed(order: Order, typed: str) -> None:
    """A restore asks for the last name of what it writes, wherever that is; undo and forget ask for the snapshot."""
    assert to_be_typed(order) == typed


def _line(action: int) -> LogLine:
    return LogLine(time="2026-01-01T00:00:00Z", who="anna", what="ciuic undo cs-abcdef", action=action)


def test_the_log_is_durable_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is synced before `add` returns, and with the first line of a file its name, too."""
    calls: list[str] = []
    sync, write = os.fsync, os.write

    def synced(fd: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        sync(fd)

    def written(fd: int, data: bytes) -> int:
        calls.append("write")
        return write(fd, data)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "write", written)
    log = ActionLog(tmp_path / "web")
    log.add(_line(1))
    log.add(_line(2))
    assert calls == ["write", "sync actions.log", "sync web", "write", "sync actions.log"]
    assert [one.action for one in log.lines()] == [1, 2]
    assert log.path.stat().st_mode & 0o077 == 0


def test_the_log_is_bounded_and_outlives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is full is kept beside the next one; a line that a crash has cut short hides no other."""
    monkeypatch.setattr(broker, "_MAX_LOG_BYTES", 300)
    log = ActionLog(tmp_path)
    for number in range(9):
        log.add(_line(number))
    kept = [one.action for one in log.lines()]
    assert kept == list(range(kept[0], 9))
    assert 3 < len(kept) < 9
    with open(log.path, "ab") as file:
        file.write(b'{"time":"2026')
    log.add(_line(9))
    assert [one.action for one in log.lines()][-2:] == [8, 9]


def test_a_summary_says_what_takes_it_back() -> None:
    """Of what a command printed, the list of actions has the safety snapshot alone, and nothing where there is none."""
    for safety in ("cs-1", None):
        printed = {"safety_snapshot": safety, "items": [1, 2]}
        done = Progress(action=1, kind="restore", who="root", document=printed, said="text", code=0)
        summary = Action(done).summary()
        assert summary.document == ({"safety_snapshot": safety} if safety else None)
        assert not summary.said
