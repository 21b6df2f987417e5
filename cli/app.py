"""The group of commands, and the edge at which errors become exit codes.

Guarantees: every way out of a command ends with a code of docs/cli.md, one message that says what happened, to what and
what to do next, and no traceback unless ``-vv`` asked; with ``--json`` a failure, too, is one document on stdout. A
command's module is imported when the command runs, or when the help lists it.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from ciuic import __version__
from ciuic.cli import INTERRUPTED
from ciuic.cli.names import shown_text
from ciuic.cli.options import global_options
from ciuic.cli.output import abandon_stdout, complain_raw, styled
from ciuic.cli.session import Session
from ciuic.cli.shells import COMPLETE_VARIABLE
from ciuic.errors import CiuicError, NotPermitted

_SUDO_DIRS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""What sudoers(5) of the distributions has as secure_path."""

# In the order in which help lists them: the way a person meets them.
COMMANDS: Final = {
    "protect": "protect_command",
    "unprotect": "unprotect_command",
    "status": "status_command",
    "snapshot": "snapshot_command",
    "watch": "watch_command",
    "list": "list_command",
    "show": "show_command",
    "verify": "verify_command",
    "restore": "restore_command",
    "diff": "diff_command",
    "hold": "hold_command",
    "release": "release_command",
    "forget": "forget_command",
    "prune": "prune_command",
    "check": "check_command",
    "config": "config_command",
    "doctor": "doctor_command",
    "service": "service_command",
    "daemon": "daemon_command",
    "reload": "reload_command",
    "stop": "stop_command",
    "completion": "completion_command",
}


class CommandGroup(click.Group):
    """Finds commands in their modules, and turns their errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(f"ciuic.cli.{module}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            # Newer versions of click suggest by themselves.
            if near and "Did you mean" not in error.message:
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None
            raise

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """As click's, with this program's exit codes. Ends by SystemExit in standalone mode."""
        run = super().main
        if not standalone_mode:
            return run(args, prog_name, complete_var, standalone_mode=False, **extra)
        session: Session = extra.setdefault("obj", Session())
        sys.exit(guarded(session, lambda: run(args, prog_name, complete_var, standalone_mode=False, **extra)))


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@global_options
@click.pass_context
def cli(context: click.Context) -> None:
    """Snapshots under a running training job, and an exact way back.

    A snapshot ID may be any unambiguous prefix, "latest", "latest~2", or a time ("2023-06-15 15:00": the newest
    snapshot not after it).
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def guarded(session: Session, run: Callable[[], Any]) -> int:
    """Runs a command and returns its exit code, having said on stderr (and in JSON) why it is not 0."""
    try:
        code = run()
        code = code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
        _json_failure(session, error.format_message(), "", code)
    except (KeyboardInterrupt, click.Abort):
        complain_raw("interrupted")
        code = INTERRUPTED
        _json_failure(session, "interrupted", "", code)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BrokenPipeError:
        abandon_stdout(session)
        code = 1
    except Exception as error:
        code = _failed(session, error)
    finally:
        session.close()
    return code or _flush(session)


def _failed(session: Session, error: Exception) -> int:
    message, hint, code = explain(error)
    if session.verbosity >= 2:
        import traceback

        complain_raw("".join(traceback.format_exception(error)).rstrip())
    # Libraries make their messages printable; what slips through must still not reach a terminal raw.
    if code == NotPermitted.exit_code:
        hint = "\n".join(filter(None, (hint, _how_sudo_finds_it())))
    complain_raw(styled("error: ", fg="red") + "\n".join(map(shown_text, message.split("\n"))))
    if hint:
        complain_raw("  " + "\n  ".join(map(shown_text, hint.split("\n"))))
    _json_failure(session, message, hint, code)
    return code


def _how_sudo_finds_it() -> str:
    """The command to be typed where sudo, which has a PATH of its own, would not find this program; empty elsewhere."""
    program = os.path.abspath(sys.argv[0])
    if os.geteuid() == 0 or os.path.dirname(program) in _SUDO_DIRS or not os.access(program, os.X_OK):
        return ""
    return f"sudo has a PATH of its own and may not find ciuic: sudo {shlex.quote(program)} …"


def explain(error: Exception) -> tuple[str, str, int]:
    """(what happened, what to do next, exit code) of an exception."""
    if isinstance(error, CiuicError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, OSError):
        where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
        text = error.strerror or str(error) or type(error).__name__
        message = f"{where}: {text}" if where else text
        if error.errno in (errno.EACCES, errno.EPERM):
            return message, "run it as root" if os.geteuid() else "", 7
        if error.errno == errno.ENOSPC:
            return message, "free some space: `ciuic prune` works on a full disk", 1
        return message, "", 1
    if isinstance(error, MemoryError):
        return "out of memory", "", 1
    text = f"unexpected failure, a defect in ciuic: {type(error).__name__}: {error}"
    return text, "run it again with -vv for the details, and report them", 1


def _json_failure(session: Session, message: str, hint: str, code: int) -> None:
    if not session.json or session.printed_json or session.stdout_gone:
        return
    session.printed_json = True
    try:
        click.echo(json.dumps({"error": message, "hint": hint, "code": code}, indent=2))
    except BrokenPipeError:
        abandon_stdout(session)


def _flush(session: Session) -> int:
    """What a script reads must have been written before 0 is claimed."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout(session)
    except OSError as error:
        abandon_stdout(session)
        complain_raw(f"error: the output could not be written: {error.strerror}")
        return 1
    return 0


def run() -> None:
    """The installed program: prepares the process, then runs the command it was asked for."""
    for stream in (sys.stdout, sys.stderr):
        # A name or message outside the locale's character set must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # SIGTERM and SIGHUP end a command as ^C does, so that temporary files go and locks are released.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    name = os.path.basename(sys.argv[0])
    # One variable for both names of the program: the completion code serves them together.
    cli.main(prog_name="ciuic" if name in ("__main__.py", "-c", "") else name, complete_var=COMPLETE_VARIABLE)
