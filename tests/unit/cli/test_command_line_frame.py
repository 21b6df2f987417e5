"""The frame of the command line: names, times, exit codes, errors, output streams."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ciuic import errors
from ciuic.cli.app import COMMANDS, GROUPS, cli, explain, guarded
from ciuic.cli.shared import messages, times
from ciuic.cli.shared.messages import absolute
from ciuic.cli.shared.options import PrintsHelp
from ciuic.cli.shared.session import Session
from ciuic.system.ownership import find_flaw

NOW_NS = 1_686_834_000_123_456_789


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


@given(st.binary(min_size=1).filter(lambda name: b"\0" not in name))
def test_shown_name_is_one_printable_line(name: bytes) -> None:
    """A name of any bytes is printed as one line of printable characters."""
    assert messages.shown(name).isprintable()


@given(st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name))
def test_shown_name_pastes_back_into_bash(name: bytes) -> None:
    """A name in the $'…' form, given to bash, is the name again, byte for byte."""
    text = messages.shown(name)
    if not text.startswith("$'") or name.startswith(b"$'"):
        return
    environment = {"LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]}
    result = subprocess.run(
        ["bash", "-c", f"printf %s {text}"], capture_output=True, check=True, env=environment
    )
    assert result.stdout == name


@given(st.binary(min_size=1))
def test_json_name_keeps_every_byte(name: bytes) -> None:
    """JSON carries the exact bytes of a name: as text when it is UTF-8, in base64 otherwise."""
    document = json.loads(json.dumps(messages.json_name("path", name)))
    if "path_base64" in document:
        assert base64.b64decode(document["path_base64"]) == name
    else:
        assert document["path"].encode("utf-8") == name


@given(st.integers(min_value=0, max_value=4_000_000_000_000_000_000))
def test_rfc3339_is_the_same_instant(time_ns: int) -> None:
    """A printed time has an offset and reads back as the same instant to the microsecond."""
    when = datetime.fromisoformat(times.rfc3339(time_ns))
    assert when.utcoffset() is not None
    assert times.parse_when(times.rfc3339(time_ns), NOW_NS) == time_ns // 1000 * 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", NOW_NS - 7200 * times.NS),
        ("1d", NOW_NS - 86400 * times.NS),
        ("2023-06-15T15:00:00Z", 1_686_841_200 * times.NS),
        ("2023-06-15T17:00:00+02:00", 1_686_841_200 * times.NS),
    ],
)
def test_times_that_people_write(text: str, expected: int) -> None:
    """Durations ago and RFC 3339 times are parsed."""
    assert times.parse_when(text, NOW_NS) == expected


def test_a_date_is_its_first_or_last_instant() -> None:
    """`--since DATE` begins with the day, `--until DATE` ends with it."""
    first = times.parse_when("2023-06-15", NOW_NS)
    last = times.parse_when("2023-06-15", NOW_NS, end_of_period=True)
    assert times.clock(first) == "2023-06-15 00:00:00"
    assert times.clock(last) == "2023-06-15 23:59:59"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("14:05", "2023-06-15 14:05:00"),
        ("9:05:07", "2023-06-15 09:05:07"),
        ("today", "2023-06-15 00:00:00"),
        ("today 14:05", "2023-06-15 14:05:00"),
        ("yesterday", "2023-06-14 00:00:00"),
        ("Yesterday 14:05", "2023-06-14 14:05:00"),
        ("2023-06-10 14:05", "2023-06-10 14:05:00"),
        ("2023-06-10T14:05:09", "2023-06-10 14:05:09"),
    ],
)
def test_times_of_the_clock_are_local(text: str, expected: str) -> None:
    """A time alone is one of today; its whole second belongs to it."""
    now_ns = int(datetime.fromisoformat("2023-06-15 16:00").timestamp()) * times.NS
    assert times.clock(times.parse_when(text, now_ns)) == expected
    last_ns = times.parse_when(text, now_ns, end_of_period=True)
    length_s = 1 if ":" in text else 86400
    assert last_ns - times.parse_when(text, now_ns) == length_s * times.NS - 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "yesterday-ish", "2023-13-01", "5 parsecs", "20230615", "2023", "2023-W10-1", "25:00", "14:5"),
        *("2023-06-15T", "today14:05", "2023-06-15 +02:00", "999999999d", "9999-12-31"),
    ],
)
def test_nonsense_is_no_time(text: str) -> None:
    """An invalid time is wrong usage, with examples of valid ones."""
    with pytest.raises(errors.UsageError) as caught:
        times.parse_when(text, NOW_NS)
    assert "write for example" in caught.value.hint


def test_a_relative_path_in_a_removed_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative path without a current directory is wrong usage, which is said; absolute paths need none."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert guarded(Session(), lambda: absolute("relative")) == 2
    assert "current directory does not exist" in capsys.readouterr().err
    assert absolute("/a/../b") == b"/b"
    assert find_flaw("/") is None


@pytest.mark.parametrize("kind", sorted(errors.BY_EXIT_CODE.values(), key=lambda kind: kind.exit_code))
def test_each_error_has_its_exit_code(
    kind: type[errors.CiuicError], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each error exits with its own code, with message and hint on stderr and nothing on stdout."""

    def fail() -> None:
        raise kind("the thing broke", hint="mend it")

    assert guarded(Session(), fail) == kind.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the thing broke" in captured.err
    assert "mend it" in captured.err


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    """^C exits with 130 and prints one word."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert guarded(Session(), interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, 7), (errno.EPERM, 7), (errno.ENOSPC, 1), (errno.EIO, 1)]
)
def test_operating_system_errors(number: int, code: int) -> None:
    """An OSError is reported with the file's name; a missing permission has its own code."""
    message, _, got = explain(OSError(number, os.strerror(number), "/some/file"))
    assert got == code
    assert message == f"/some/file: {os.strerror(number)}"


def test_traceback_only_with_vv(capsys: pytest.CaptureFixture[str]) -> None:
    """A defect is one line; with -vv it has its traceback."""

    def defect() -> None:
        raise ZeroDivisionError("by zero")

    assert guarded(Session(), defect) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert guarded(Session(verbosity=2), defect) == 1
    assert "Traceback" in capsys.readouterr().err


def test_json_failure_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure with --json is one document, and no second one is printed where one is out already."""

    def fail() -> None:
        raise errors.NotFound("no such snapshot cs-000000", hint="ciuic list")

    assert guarded(Session(json=True), fail) == 3
    assert json.loads(capsys.readouterr().out) == {
        "error": "no such snapshot cs-000000",
        "hint": "ciuic list",
        "code": 3,
    }
    guarded(Session(json=True, printed_json=True), fail)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    """Every command can be imported and has a help text, which `help` prints as well."""
    result = CliRunner().invoke(cli, [name, "--help"])
    for before in ([], ["-v"], ["--repo", "help", "-q"]):
        assert CliRunner().invoke(cli, [*before, "help", name]).output == result.output
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: cli {name}")


@pytest.mark.parametrize("columns", [60, 80])
def test_the_first_page_has_whole_summaries_in_groups(columns: int) -> None:
    """Each command stands on one line with its whole summary, below the title of its group."""
    result = CliRunner().invoke(cli, ["--help"], terminal_width=columns)
    assert CliRunner().invoke(cli, ["-q", "help"], terminal_width=columns).output == result.output
    lines = result.output.splitlines()
    for title, commands in GROUPS.items():
        assert f"{title}:" in lines
        for name, summary in commands.items():
            assert [line.split(maxsplit=1) for line in lines].count([name, summary]) == 1
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if "..." in line and "[ARGS]" not in line]


@pytest.mark.parametrize("name", [name for name in COMMANDS if isinstance(_command(name), click.Group)])
def test_groups_of_commands_have_whole_summaries(name: str) -> None:
    """No summary of a command below a command is cut."""
    output = CliRunner().invoke(cli, [name, "--help"], terminal_width=60).output
    assert not [line for line in output.splitlines() if line.endswith("...") and not line.startswith("Usage")]


def test_unknown_command_suggests_the_nearest() -> None:
    """A misspelt command is wrong usage, and the nearest one is suggested."""
    result = CliRunner().invoke(cli, ["resotre"])
    assert result.exit_code == 2
    assert "'restore'" in result.stderr


def test_global_options_before_and_after_the_command(tmp_path: Path) -> None:
    """--repo means the same before the command and after it, and needs no configuration file."""
    missing = tmp_path / "nowhere"
    before = CliRunner().invoke(cli, ["--repo", str(missing), "list"])
    after = CliRunner().invoke(cli, ["list", "--repo", str(missing)])
    environment = CliRunner().invoke(cli, ["list"], env={"CIUIC_REPO": str(missing)})
    assert before.exit_code == after.exit_code == environment.exit_code == 3
    assert str(missing) in before.stderr
    assert before.stderr == after.stderr == environment.stderr


def run_ciuic(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "ciuic", *arguments], capture_output=True, check=False, **kwargs
    )  # type: ignore[call-overload,no-any-return]


def test_a_reader_that_leaves_is_no_failure() -> None:
    """`ciuic … | head -1` prints nothing on stderr and does not fail."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "ciuic", "completion", "bash"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (0, b"")


def test_output_that_cannot_be_written_is_a_failure() -> None:
    """Output to a full device does not exit with 0."""
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "ciuic", "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert result.returncode == 1
    assert b"could not be written" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_dev_null(closed: str) -> None:
    """A closed standard stream changes no exit code, and its number is given to no repository file."""
    command = f'"{sys.executable}" -m ciuic completion bash {closed}'
    result = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert bool(result.stdout) is (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize(("arguments", "code"), [(["show", "zz"], 3), (["lst"], 2)], ids=["failure", "usage"])
def test_a_message_that_cannot_be_written_changes_no_exit_code(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    """A message that cannot be written to a full stderr does not change the exit code."""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "ciuic", "--repo", str(tmp_path / "none"), *arguments]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, check=False)
    assert result.returncode == code


def test_version_names_the_program() -> None:
    """`ciuic --version` prints name and version and exits with 0."""
    from ciuic import __version__

    result = run_ciuic("--version")
    assert (result.returncode, result.stdout) == (0, f"ciuic {__version__}\n".encode())


def test_import_of_the_list_command_is_small() -> None:
    """`ciuic list` loads neither rich nor httpx nor the configuration nor hashing, to start fast."""
    code = (
        "import sys; from ciuic.cli import app; app.cli.get_command(None, 'list'); "
        "print([m for m in ('rich','httpx','zstandard','trio','pathspec','structlog','ciuic.config','ciuic.daemon','bz2','tempfile')"
        " if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_signals_end_a_command_in_good_order() -> None:
    """SIGTERM ends a waiting command like ^C: code 130, no traceback."""
    code = (
        "import sys, time, click\n"
        "from ciuic.cli import app, main\n"
        "@app.cli.command('wait')\n"
        "def wait():\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "app.COMMANDS = (); app.CommandGroup.get_command = lambda self, c, n: self.commands.get(n)\n"
        "sys.argv = ['ciuic', 'wait']; main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=30)
    assert (process.returncode, output.strip()) == (130, b"interrupted")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("snapshot", "ciuic.cli.fast_snapshot"),
        ("list", "gc"),
        ("list", "ciuic.cli.app"),
        ("list", "click"),
        ("list", "ciuic.cli.shared.options"),
    ],
)
def test_an_interrupt_during_the_imports_ends_quietly(command: str, module: str) -> None:
    """^C while the program is still being imported ends it when that is done, with 130; "interrupted" is all it may say."""
    code = (
        "import signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ciuic.cli import main\n"
        "from ciuic.system import interrupts\n"
        "interrupts._AGAIN_SECONDS = 50e-6\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"sys.modules.pop({module!r}, None)\n"
        f"sys.argv = ['ciuic', {command!r}]; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr in (b"", b"interrupted\n")


def test_an_interrupt_before_the_first_import_of_a_command_is_silent() -> None:
    """^C in the first import of a command, which is that of the handler of ^C, ends it with 130 and says nothing."""
    code = (
        "import _signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        _signal.raise_signal(_signal.SIGINT)\n"
        "_signal.signal(_signal.SIGINT, _signal.default_int_handler)\n"
        "from ciuic.cli import main\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.argv = ['ciuic', 'list']; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_click_errors_are_usage() -> None:
    """Unknown options and missing arguments exit with 2."""
    assert CliRunner().invoke(cli, ["list", "--no-such-option"]).exit_code == 2
    assert CliRunner().invoke(cli, ["verify"]).exit_code == 2


def test_a_refusal_says_how_sudo_finds_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal has the path to be typed in a virtual environment, where sudo does not find `ciuic`."""
    program = tmp_path / "a b" / "ciuic"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 64123)
    monkeypatch.setattr(sys, "argv", [str(program), "list"])

    def refuse() -> None:
        raise errors.NotPermitted("cannot read /repo/config", hint="run as root")

    assert guarded(Session(), refuse) == 7
    assert f"sudo '{program}' …" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["/usr/bin/env", "list"])
    guarded(Session(), refuse)
    assert "sudo" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], [], ["snapshot", "--help"], ["config", "--help"], ["config", "show", "-h"]],
)
def test_help_and_version_need_no_reader(words: list[str]) -> None:
    """Help and version exit with 0 when the reader has left, and with 1 and a message on a full disk."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "ciuic", *words]
    gone = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write_end)
    assert (gone.returncode, gone.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith(b"error: the output could not be written")


def _all_commands() -> Iterator[click.Command]:
    yield cli
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            context = click.Context(command)
            found = [command.get_command(context, inner) for inner in command.list_commands(context)]
            yield from (one for one in found if one is not None)


def test_every_command_prints_its_help_like_a_result() -> None:
    """No command's help is printed by click, which exits with 1 when the reader has left."""
    assert [command.name for command in _all_commands() if not isinstance(command, PrintsHelp)] == []
