"""`ciuic pick`: the screen, driven by keys alone, on real repositories."""

from __future__ import annotations

import asyncio
import os
import pty
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from support.checkpoint_files import FORMATS
from support.cli_repository import CliRepository
from support.object_servers import environment_for_s3
from support.remote_host import RemoteHost, new_remote
from support.restoring import write

from ciuic.cli.commands.pick import answers, command
from ciuic.cli.commands.pick.answers import Node, Version
from ciuic.cli.commands.pick.reader import Answer, Question, Reader
from ciuic.cli.commands.pick.screen import Picker, RestoreScreen, Rows
from ciuic.cli.shared import times
from ciuic.cli.shared.session import Session
from ciuic.remote.objects.opening import open_objects
from ciuic.repository import Repository
from ciuic.system.poll import readable

SECONDS = 60.0
_AGAIN_SECONDS = 5.0
HOSTILE = (b"<b>bold", b"[red]x[", b"\x1b[2Jcleared", b"\xff\xfe", "‮rtl".encode(), b"a\nb", b"n" * 255)


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    (tmp_path / "root").mkdir()
    return CliRepository(tmp_path / "repo", tmp_path / "root")


Play = Callable[[Picker, Any], Awaitable[None]]


async def until(pilot: Any, condition: Callable[[], Any]) -> None:
    """Let the program go on until the condition holds: the reader's answers come when they come."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, screen_text(pilot.app)
        await pilot.pause(0.02)


async def rested(picker: Picker, pilot: Any, name: str) -> None:
    """Wait until the versions of a name at the cursor are there, with verdicts and preview."""
    await until(
        pilot,
        lambda: (
            not picker.reader.is_busy
            and isinstance(picker.versions.item, Version)
            and isinstance(picker.names.item, Node)
            and picker.names.item.name.endswith(name)
            and picker.versions.item.path == picker.names.item.path
        ),
    )


async def go_to(picker: Picker, pilot: Any, name: str) -> None:
    """Move down to a name of the tree, and wait for its versions."""
    await until(pilot, lambda: any(isinstance(one, Node) and one.name == name for one in picker.names.items))
    await until(pilot, lambda: not picker.reader.is_busy)
    at = next(at for at, one in enumerate(picker.names.items) if isinstance(one, Node) and one.name == name)
    for _ in range(at - picker.names.cursor):
        await pilot.press("down")
    await rested(picker, pilot, name)


def lines_of(picker: Picker, id_: str) -> list[str]:
    """Return the texts of a list."""
    rows = picker.screen.query_one(f"#{id_}", Rows)
    return ["".join(part.text for part in rows._draw(item)) for item in rows.items]


def screen_text(app: Any) -> str:
    return "\n".join(
        "".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()
    )


def played(
    repository: CliRepository,
    play: Play,
    *,
    path: bytes | None = None,
    columns: int = 100,
    config: Path | None = None,
) -> Picker:
    """Run the program on a screen without a terminal, and play."""
    session = Session(config_option=config or Path("/dev/null"), repo_option=repository.path)
    return played_in(session, play, path=path, columns=columns, cwd=os.fsencode(repository.path.parent))


def played_in(session: Session, play: Play, *, path: bytes | None, columns: int = 100, cwd: bytes) -> Picker:
    reader = Reader(click.Context(command, obj=session))
    picker = Picker(reader, path, cwd)

    async def run() -> None:
        async with picker.run_test(size=(columns, 30)) as pilot:
            await play(picker, pilot)

    reader.start()
    try:
        asyncio.run(run())
    finally:
        ended = reader.end()
    assert ended
    return picker


def test_from_a_path_over_a_version_and_its_preview_to_a_restore(
    repository: CliRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of an older version is found, looked at, planned, restored over the present one, and the undo is named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    repository.snapshot({b"sub": {b"a.txt": b"first\n"}, b"z": b""})
    repository.snapshot({b"sub": {b"a.txt": b"second\n"}, b"z": b""})
    file = repository.root / "sub/a.txt"
    file.parent.mkdir()
    file.write_bytes(b"spoilt\n")
    config = tmp_path / "c.toml"
    config.write_text(f'[control]\nsocket = "{tmp_path}/s"\n[[root]]\npath = "{repository.root}"\n')

    async def play(picker: Picker, pilot: Any) -> None:
        await rested(picker, pilot, "root")
        await go_to(picker, pilot, "sub")
        await pilot.press("right")
        await go_to(picker, pilot, "a.txt")
        assert lines_of(picker, "preview") == ["second"]
        await pilot.press("enter", "down")
        await until(pilot, lambda: lines_of(picker, "preview") == ["first"])
        await pilot.press("r")
        await until(pilot, lambda: isinstance(picker.screen, RestoreScreen))
        await pilot.press("i")
        await until(pilot, lambda: picker.screen.stage == "confirm")
        plan = " ".join(" ".join(lines_of(picker, "plan")).split())
        assert f"restored {file}" in plan
        assert "1 file, 6 B would be restored from cs-000001" in plan
        assert "replaced: 1 file" in plan
        assert file.read_bytes() == b"spoilt\n"
        await pilot.press("y")
        await until(pilot, lambda: picker.screen.stage == "done")
        told = lines_of(picker, "plan")
        assert "1 file, 6 B restored from cs-000001" in told
        assert told[-1] == "done; ciuic undo takes it back"
        await pilot.press("escape", "q")

    assert played(repository, play, config=config).exit_status == 0
    assert file.read_bytes() == b"first\n"
    assert repository.run("--config", str(config), "undo").exit_code == 0
    assert file.read_bytes() == b"spoilt\n"


def test_a_restore_beside_and_a_refusal(
    repository: CliRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory goes into another one, which is never overwritten; without an answer nothing is done."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    repository.snapshot({b"sub": {b"a": b"1", b"b": b"22"}})

    async def ask(picker: Picker, pilot: Any) -> None:
        await until(pilot, lambda: isinstance(picker.versions.item, Version) and not picker.reader.is_busy)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(picker.screen, RestoreScreen))
        await pilot.press("b", "enter")

    async def refuse(picker: Picker, pilot: Any) -> None:
        await ask(picker, pilot)
        await until(pilot, lambda: picker.screen.stage == "confirm")
        await pilot.press("n", "q")

    async def accept(picker: Picker, pilot: Any) -> None:
        await ask(picker, pilot)
        await until(pilot, lambda: picker.screen.stage == "confirm")
        await pilot.press("y")
        await until(pilot, lambda: picker.screen.stage == "done")
        await pilot.press("escape", "q")

    path = os.fsencode(repository.root / "sub")
    played(repository, refuse, path=path)
    assert not (tmp_path / "restored").exists()
    played(repository, accept, path=path)
    assert {one.name: one.read_bytes() for one in (tmp_path / "restored/sub").iterdir()} == {
        "a": b"1",
        "b": b"22",
    }

    async def conflict(picker: Picker, pilot: Any) -> None:
        await ask(picker, pilot)
        await until(pilot, lambda: picker.screen.stage == "confirm")
        assert "2 files exist and would stop the restore" in "\n".join(lines_of(picker, "plan"))
        await pilot.press("y")
        await until(pilot, lambda: picker.screen.stage == "done")
        assert not any(line.startswith("done") for line in lines_of(picker, "plan"))
        await pilot.press("escape", "q")

    (tmp_path / "restored/sub/a").write_bytes(b"mine")
    played(repository, conflict, path=path)
    assert (tmp_path / "restored/sub/a").read_bytes() == b"mine"


@pytest.mark.parametrize("columns", [60, 100, 120])
def test_hostile_names_and_contents_stay_text(repository: CliRepository, columns: int) -> None:
    """Markup, escape sequences, names of 255 bytes and such that are not UTF-8 are shown as text, within the screen."""
    repository.snapshot(dict.fromkeys(HOSTILE, b"[bold]x[/bold] \x1b]0;title\x07\x1b[31m"))

    async def play(picker: Picker, pilot: Any) -> None:
        await until(pilot, lambda: len(picker.names.items) == 1 + len(HOSTILE))
        names = "\n".join(lines_of(picker, "names"))
        assert "<b>bold" in names
        assert "[red]x[" in names
        assert r"$'\E[2Jcleared'" in names
        assert r"$'\xff\xfe'" in names
        for _ in HOSTILE:
            await pilot.press("down")
            node = picker.names.item
            await rested(picker, pilot, node.name)
            assert lines_of(picker, "preview") == [r"[bold]x[/bold] \x1b]0;title\x07\x1b[31m"]
            assert_fits(picker, columns)
        await pilot.press("enter", "r")
        await until(pilot, lambda: isinstance(picker.screen, RestoreScreen))
        await pilot.press("i")
        await until(pilot, lambda: picker.screen.stage == "confirm")
        assert_fits(picker, columns)
        await pilot.press("escape", "q")

    played(repository, play, columns=columns)


def assert_fits(picker: Picker, columns: int) -> None:
    """No line is wider than the screen, and nothing on it controls a terminal."""
    for strip in picker.screen._compositor.render_strips():
        text = "".join(segment.text for segment in strip if not segment.control)
        assert sum(segment.cell_length for segment in strip) == columns, text
        assert text.isprintable(), text


@pytest.mark.parametrize("columns", [60, 120])
def test_what_matters_is_on_the_screen(repository: CliRepository, columns: int) -> None:
    """Time, snapshot, size, change and verdict of a version show at 60 columns as well, and so do the keys."""
    weights = FORMATS["safetensors"].make(random.Random(1))
    repository.snapshot({b"w.safetensors": weights}, mode="tracked")
    repository.snapshot({b"w.safetensors": weights[:-5]}, mode="tracked")

    async def play(picker: Picker, pilot: Any) -> None:
        await rested(picker, pilot, "w.safetensors")
        text = screen_text(picker)
        for part in (
            "2023-06-15",
            "cs-000001",
            "cs-000002",
            "content",
            "GOOD",
            "TORN",
            "q quit",
            "r restore",
        ):
            assert part in text, text
        await pilot.press("enter", "down")
        await until(
            pilot, lambda: not picker.reader.is_busy and "tensor" in "".join(lines_of(picker, "preview"))
        )
        await pilot.press("q")

    played(repository, play, columns=columns, path=os.fsencode(repository.root / "w.safetensors"))


def test_names_that_are_gone_and_a_filter(repository: CliRepository) -> None:
    """A name that only older snapshots have is in the tree; `/` shows what has a text, and enter searches everywhere."""
    repository.snapshot({b"a": {b"deep": {b"lost.pt": b"x"}}, b"gone": b"1", b"kept": b"2"})
    repository.snapshot({b"a": {b"deep": {}}, b"kept": b"2"})

    async def play(picker: Picker, pilot: Any) -> None:
        await until(pilot, lambda: len(picker.names.items) == 4)
        await go_to(picker, pilot, "gone")
        assert [row.found.kind for row in picker.versions.items] == ["gone", "added"]
        assert lines_of(picker, "preview")[0] == "GONE"
        await pilot.press("enter", "r")
        assert "GONE there" in screen_text(picker)
        await pilot.press("left", "slash", "k", "e")
        await until(pilot, lambda: [one.name for one in picker.names.items] == ["kept"])
        await pilot.press("escape")
        assert len(picker.names.items) == 4
        await pilot.press("slash", *"[gk]*")
        await until(pilot, lambda: [one.name for one in picker.names.items] == ["kept", "gone"])
        await pilot.press("escape")
        await rested(picker, pilot, picker.names.item.name)
        await go_to(picker, pilot, "kept")
        await pilot.press("slash", *"lost", "enter")
        await until(pilot, lambda: [one.name[-7:] for one in picker.names.items] == ["lost.pt"])
        await rested(picker, pilot, "lost.pt")
        await pilot.press("escape")
        # The tree opens down to what was found.
        await until(pilot, lambda: picker.names.item.name == "lost.pt" and picker.names.item.depth == 3)
        await rested(picker, pilot, "lost.pt")
        await pilot.press("q")

    played(repository, play)


def test_a_row_and_its_restore_are_of_one_ordinary_snapshot(repository: CliRepository) -> None:
    """The newest with the version; a safety snapshot, which is removed soon, only where there is no other."""
    safety = {"tags": ("safety",), "message": "before the restore from cs-000001"}
    repository.snapshot({b"f": b"one"})
    repository.snapshot({b"f": b"one", b"more": b""})
    repository.snapshot({b"f": b"one"}, **safety)
    repository.snapshot({b"f": b"other"}, **safety)

    async def play(picker: Picker, pilot: Any) -> None:
        await rested(picker, pilot, "f")
        newest, oldest = picker.versions.items
        assert (str(newest.snapshot.id), str(oldest.snapshot.id)) == ("cs-000004", "cs-000002")
        with Repository.open(repository.path) as opened:
            time_ns = opened.snapshots.load(oldest.snapshot.id).time_ns
        rows = screen_text(picker).splitlines()
        assert any(f"{times.clock(time_ns)}  cs-000002" in row and "safety" not in row for row in rows)
        await pilot.press("enter", "down")
        await rested(picker, pilot, "f")
        await pilot.press("r")
        await until(pilot, lambda: isinstance(picker.screen, RestoreScreen))
        await until(pilot, lambda: "as in cs-000002" in screen_text(picker))
        await pilot.press("escape", "q")

    played(repository, play, columns=120, path=os.fsencode(repository.root / "f"))


def test_two_marked_versions_are_compared(repository: CliRepository) -> None:
    """`d` shows the lines that differ between two marked versions, and of directories the names; `y` the command."""
    path = os.fsencode(repository.root / "f")
    for text in (b"one\n", b"one\ntwo\n", b"one\ntwo\nthree\n"):
        repository.snapshot({b"f": text, b"new" if b"three" in text else b"old": b""})

    async def play(picker: Picker, pilot: Any) -> None:
        await rested(picker, pilot, "f")
        await pilot.press("enter", "space", "down", "down", "space", "d")
        await until(pilot, lambda: "+three" in lines_of(picker, "preview"))
        assert "+two" in lines_of(picker, "preview")
        await pilot.press("y")
        assert f"ciuic --repo {repository.path} diff cs-000001 cs-000003 -p {path.decode()}" in picker.printed
        await pilot.press("left", "left", "left")
        await rested(picker, pilot, "root")
        await until(pilot, lambda: len(lines_of(picker, "preview")) == 4)
        assert lines_of(picker, "preview")[1:] == [
            f"M {repository.root}/f  [content, size]",
            f"+ {repository.root}/new",
            f"- {repository.root}/old",
        ]
        await pilot.press("n")
        await until(
            pilot, lambda: any(line.startswith(f"- {path.decode()}") for line in lines_of(picker, "preview"))
        )
        await pilot.press("q")

    played(repository, play, path=path)


def test_a_copy_never_overwrites(repository: CliRepository, tmp_path: Path) -> None:
    """`c` copies a file into the current directory, once."""
    repository.snapshot({b"f": b"content"})

    async def play(picker: Picker, pilot: Any) -> None:
        await rested(picker, pilot, "f")
        await pilot.press("c")
        await until(pilot, lambda: "1 file, 7 B restored" in screen_text(picker))
        (tmp_path / "f").write_bytes(b"mine")
        await pilot.press("c")
        await until(pilot, lambda: "exist" in screen_text(picker))
        await pilot.press("q")

    played(repository, play, path=os.fsencode(repository.root / "f"), columns=200)
    assert (tmp_path / "f").read_bytes() == b"mine"


def test_of_a_long_list_the_lines_in_view_are_made(
    repository: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a directory costs the screen does not grow with its names."""
    count = 5000
    repository.snapshot({b"%05d" % number: b"" for number in range(count)})
    drawn: list[str] = []

    async def play(picker: Picker, pilot: Any) -> None:
        await until(pilot, lambda: len(picker.names.items) == count + 1)
        await until(pilot, lambda: not picker.reader.is_busy)
        draw = picker.names._draw
        monkeypatch.setattr(picker.names, "_draw", lambda item: (drawn.append(item.name), draw(item))[1])
        await pilot.press("end")
        await rested(picker, pilot, f"{count - 1:05d}")
        assert f"{count - 1:05d}" in screen_text(picker)
        assert len(set(drawn)) <= 2 * picker.names.size.height
        await pilot.press("q")

    played(repository, play)


def test_the_program_is_left_while_a_store_does_not_answer(
    repository: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`q` ends the program at once, whatever the repository is doing."""
    repository.snapshot({b"f": b""})
    go_on = threading.Event()
    began = threading.Event()

    def waits(session: Session, path: bytes | None) -> Iterator[Any]:
        began.set()
        go_on.wait(SECONDS)
        yield from ()

    monkeypatch.setattr(answers, "opened", waits)
    reader = Reader(click.Context(command, obj=Session(repo_option=repository.path)))
    picker = Picker(reader, None, b"/")

    async def run() -> None:
        async with picker.run_test() as pilot:
            await until(pilot, began.is_set)
            await until(pilot, lambda: "reading" in screen_text(picker))
            await pilot.press("q")

    reader.start()
    asyncio.run(run())
    assert not reader.end()
    go_on.set()
    reader._thread.join(SECONDS)


def test_a_newer_question_is_answered_in_the_middle_of_an_older_one() -> None:
    """A long search keeps nothing waiting, and stops when another search replaces it."""
    reader = Reader(click.Context(command, obj=Session()))
    told: list[Answer] = []
    done = threading.Event()
    stopped = threading.Event()
    first = threading.Event()

    def tell(answer: Answer) -> None:
        told.append(answer)
        if answer.kind == "short":
            reader.ask("long", lambda question: iter(["new"]))
        if answer.kind == "long" and answer.items == ["new"]:
            done.set()

    def long(question: Question) -> Iterator[str]:
        first.set()
        try:
            while True:
                question.pause()
                yield "old"
        finally:
            stopped.set()

    reader.tell = tell
    reader.start()
    reader.ask("long", long)
    assert first.wait(SECONDS)
    reader.ask("short", lambda question: iter(["short"]))
    assert done.wait(SECONDS)
    assert stopped.wait(SECONDS)
    assert reader.end()


def test_a_comparison_with_the_disk_is_left_for_another_question(
    repository: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the names of a directory, also where nothing differs, newer questions are answered."""
    names = [b"%d" % number for number in range(20)]
    repository.snapshot(dict.fromkeys(names, b""))
    for name in names:
        (repository.root / name.decode()).write_bytes(b"")
    pauses: list[str] = []

    async def play(picker: Picker, pilot: Any) -> None:
        await rested(picker, pilot, "root")
        pause = Reader.pause
        monkeypatch.setattr(
            Reader,
            "pause",
            lambda reader, question: (pauses.append(question.kind), pause(reader, question))[1],
        )
        await pilot.press("n")
        await until(pilot, lambda: pauses.count("preview") >= len(names))
        await pilot.press("q")

    played(repository, play)


def test_a_file_that_cannot_be_read_is_told(repository: CliRepository) -> None:
    """Damage is a line on the screen, and not the end of the program."""
    repository.snapshot({b"f": os.urandom(100_000)})
    pack = max(repository.path.glob("packs/**/*"), key=lambda one: one.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
    pack.write_bytes(data)

    async def play(picker: Picker, pilot: Any) -> None:
        await rested(picker, pilot, "f")
        assert any("damaged" in line for line in lines_of(picker, "preview")), lines_of(picker, "preview")
        await pilot.press("q")

    played(repository, play, path=os.fsencode(repository.root / "f"))


def test_no_repository_is_an_error_of_the_command(tmp_path: Path) -> None:
    """Where nothing can be opened the screen closes, and the error is told as by every command."""

    async def play(picker: Picker, pilot: Any) -> None:
        await until(pilot, lambda: picker.failure is not None)

    made = CliRepository(tmp_path / "none", tmp_path, make=False)
    picker = played(made, play)
    assert "none" in str(picker.failure)


def test_the_missing_extra_is_named(repository: CliRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without textual the command says what to install."""
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "ciuic.cli.commands.pick.screen")
    for name in [name for name in sys.modules if name.startswith("textual.")]:
        monkeypatch.delitem(sys.modules, name)
    result = repository.run("pick")
    assert result.exit_code == 2
    assert f"{sys.executable} -m pip install 'ciuic[tui]'" in result.stderr


def test_a_terminal_is_needed(repository: CliRepository) -> None:
    """In a pipe the command names those that do the same."""
    result = repository.run("pick")
    assert result.exit_code == 2
    assert "needs a terminal" in result.stderr


def test_other_commands_do_not_import_the_screen(repository: CliRepository) -> None:
    """Neither another command nor the help imports textual."""
    script = (
        "import sys; from ciuic.cli.app import cli; from ciuic.cli.shared.session import Session\n"
        "for words in (['list'], ['--help'], ['pick', '--help']):\n"
        "    cli.main(words, standalone_mode=False, obj=Session())\n"
        "assert 'textual' not in sys.modules"
    )
    environment = {**os.environ, "CIUIC_CONFIG": "/dev/null", "CIUIC_REPO": str(repository.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", [{}, {"NO_COLOR": "1"}, {"TERM": "xterm"}])
def test_on_a_terminal(repository: CliRepository, extra: dict[str, str]) -> None:
    """On a terminal of any colours the program comes up, ends with 0, and prints the command line that was asked for."""
    repository.snapshot({b"f": b"seen-in-the-preview\n"})
    path = repository.root / "f"
    output, code = on_keys(
        str(repository.path), str(path), [(b"seen-in-the-preview", b"y"), (b"the same as", b"q")], extra
    )
    assert code == 0, output
    assert (
        f"ciuic --repo {repository.path} restore -s cs-000001 -p {path} --overwrite=always".encode() in output
    )
    if "NO_COLOR" in extra:
        assert b"\x1b[31m" not in output
        assert b"38;" not in output


def test_two_hosts_of_a_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a remote the roots of all hosts are shown, and a file is restored from there, with no repository and no daemon."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/nas"
    remote = new_remote(open_objects(url, make=True), sealed=False)
    roots = []
    for name in ("alpha", "beta"):
        host = RemoteHost(tmp_path / name, remote, name=name, own_identity=name == "beta")
        write(host.root / "file", b"of " + name.encode())
        host.snapshot()
        host.upload()
        host.repository.close()
        roots.append(host.root)

    async def play(picker: Picker, pilot: Any) -> None:
        await until(pilot, lambda: len(picker.names.items) == 2)
        assert [one.name for one in picker.names.items] == [str(root) for root in roots]
        await rested(picker, pilot, str(roots[0]))
        await pilot.press("down", "right")
        await go_to(picker, pilot, "file")
        assert lines_of(picker, "preview") == ["of beta"]
        await pilot.press("r")
        await until(pilot, lambda: isinstance(picker.screen, RestoreScreen))
        await pilot.press("b", "enter")
        await until(pilot, lambda: picker.screen.stage == "confirm")
        await pilot.press("y")
        await until(pilot, lambda: picker.screen.stage == "done")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(picker.screen, RestoreScreen))
        await pilot.press("y")
        await until(pilot, lambda: picker.printed)
        await pilot.press("q")

    monkeypatch.chdir(tmp_path)
    session = Session(config_option=Path("/dev/null"), remote_option=url, may_ask=False)
    picker = played_in(session, play, path=None, cwd=os.fsencode(tmp_path))
    assert (tmp_path / "restored/file").read_bytes() == b"of beta"
    assert picker.printed[0].startswith(f"ciuic --repo {url} restore -s cs-")


def test_a_remote_that_does_not_answer_is_left(repository: CliRepository, tmp_path: Path) -> None:
    """`q` ends the program with 0 while a request to a store has no answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        variables = environment_for_s3(f"http://127.0.0.1:{port}") | {
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        output, code = on_keys("s3://bucket/prefix", "/x", [(b"reading", b"q")], variables)
    assert code == 0, output


def on_keys(
    place: str, path: str, keys: list[tuple[bytes, bytes]], extra: dict[str, str]
) -> tuple[bytes, int]:
    """Run the program on a terminal, and press keys when the terminal has got a text; return its output and exit code."""
    ours, theirs = pty.openpty()
    variables = {
        **os.environ,
        "CIUIC_CONFIG": "/dev/null",
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        "LINES": "30",
    }
    variables.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-m", "ciuic", "--repo", place, "pick", path],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables | extra,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        output, seen, pressed = b"", 0, b""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            # As a person does: a key that came while the screen was being made has no effect.
            if not readable(ours, _AGAIN_SECONDS):
                os.write(ours, pressed)
                continue
            try:
                output += os.read(ours, 65536)
            # EIO: the program has ended.
            except OSError:
                break
            while keys and keys[0][0] in output[seen:]:
                seen, pressed = len(output), keys.pop(0)[1]
                os.write(ours, pressed)
        else:
            process.kill()
    os.close(ours)
    return output, process.returncode
