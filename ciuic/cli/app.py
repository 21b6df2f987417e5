"""The group of commands, and the edge at which errors become exit codes.

Guarantees: every way out of a command ends with a code of docs/cli.md, one message that says what happened, to what and
what to do next, and no traceback unless ``-vv`` asked; with ``--json`` a failure, too, is one document on stdout. A
command's module is imported when the command runs, or when the help lists it.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import click

from ciuic import __version__
from ciuic.cli import COMPLETE_VARIABLE, INTERRUPTED
from ciuic.cli.shared.messages import complain, shown_text, styled
from ciuic.cli.shared.options import FrameGroup, global_options, version_option
from ciuic.cli.shared.output import abandon_stdout, out
from ciuic.cli.shared.session import Session
from ciuic.errors import CiuicError, NotPermitted, pip_install

_SUDO_DIRS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""What sudoers(5) of the distributions has as secure_path."""

# In the order in which help lists them: the way a person meets them. A summary fits on a line of 60 columns.
GROUPS: Final = {
    "Daily": {
        "protect": "Put directories into all future snapshots",
        "unprotect": "Stop protecting directories",
        "status": "Show daemon, roots, work at risk and alerts",
        "snapshot": "Take a snapshot now and print its id",
        "list": "List the snapshots, newest first",
        "restore": "Restore files from a snapshot",
        "undo": "Take back the last restore",
    },
    "Look into snapshots": {
        "pick": "Choose a path and a version on the screen",
        "show": "Show a snapshot, or a directory in it",
        "diff": "Compare two snapshots, or one with now",
        "history": "Show the versions of a path",
        "find": "Find names in all snapshots",
        "changed": "Show what changed since a time",
        "checkpoints": "List checkpoints with a verdict on each",
        "tensors": "Show norms, drift and NaN of a checkpoint",
        "cat": "Print a file as it was",
        "mount": "Show snapshots as a read-only directory",
        "shell": "Run a program as if it were then",
        "bisect": "Find the first bad snapshot by a command",
    },
    "Repository": {
        "hold": "Exempt snapshots from prune and forget",
        "release": "End a hold: retention decides again",
        "tag": "Change tags and messages of snapshots",
        "forget": "Delete the snapshots that are named",
        "prune": "Delete by the retention policy, free space",
        "verify": "Can snapshots be restored? Read their data",
        "drill": "Prove that a restore works: do a part of it",
        "check": "Is the repository consistent? Repair it",
        "stats": "Show what each snapshot takes, would free",
        "copy": "Copy the repository while it is in use",
        "remote": "Copies on object stores or other machines",
        "fleet": "All hosts of a remote: are they well?",
    },
    "Training": {
        "watch": "Take a snapshot when a program dies or hangs",
        "export": "Write a training's state for other programs",
        "import": "Make a snapshot of another program's state",
        "slurm": "Run a job that is saved, requeued, resumed",
    },
    "Service": {
        "doctor": "Is this host fit? Look at all it depends on",
        "service": "Install, remove or look at the service",
        "daemon": "Run the service in the foreground",
        "reload": "Have the daemon read its configuration",
        "stop": "Stop the daemon",
        "config": "Show, check or convert the configuration",
        "metrics": "Print the daemon's metrics once",
        "exporter": "Serve metrics to Prometheus, and send traces",
        "web": "Show the snapshots in a browser",
        "log": "Print what was done from that page",
        "completion": "Print shell completion code",
    },
}
_RARE: Final = "Before a command also: --as-host, --all-claims, --behind-deletions and --stored-before, of a remote, and --trust-repository (docs/cli.md)."
COMMANDS: Final = tuple(name for group in GROUPS.values() for name in group)
# Modules that have several commands, each called `NAME_command` there, or a name of their own.
_MODULES: Final = {
    "hold": "forget",
    "release": "forget",
    "tag": "forget",
    "check": "verify",
    "unprotect": "protect",
    "undo": "restore",
    "cat": "show",
    "shell": "mount",
    "bisect": "mount",
    "find": "history",
    "changed": "history",
    "checkpoints": "history",
    "export": "export_import",
    "import": "export_import",
    "reload": "service",
    "stop": "service",
    "exporter": "metrics",
    "log": "web",
}


class CommandGroup(FrameGroup):
    """Group that imports a command's module when the command is used, and turns errors into exit codes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``help COMMAND`` for ``COMMAND --help``, also after global options."""
        # `help` may also be the value of one of them, or of an option of a command: what is left of them tells.
        rest = self.make_parser(ctx).parse_args(list(args))[1] if "help" in args else []
        if rest[:1] == ["help"]:
            args = [*args[: -len(rest)], *rest[1:], "--help"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, without importing them."""
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"`{ctx.find_root().info_name} help COMMAND` says more. {_RARE}")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command."""
        # The word is typed by the user: only names of the list become names of modules.
        if cmd_name not in COMMANDS:
            return None
        # Imported when it runs: all of them take 30 ms of processor time, which only the help needs to spend.
        module = importlib.import_module(f"ciuic.cli.commands.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name}_command", None) or module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; suggest the nearest name for an unknown one."""
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
        """Run like click's `main`, with this program's exit codes. Raises SystemExit in standalone mode."""
        # click's standalone mode would exit with codes of its own, such as 1 for ^C.
        run = super().main
        if not standalone_mode:
            return run(args, prog_name, complete_var, standalone_mode=False, **extra)
        # Made before the arguments are parsed, so that a mistake in them is reported as --json and -q ask.
        session: Session = extra.setdefault("obj", Session())
        sys.exit(guarded(session, lambda: run(args, prog_name, complete_var, standalone_mode=False, **extra)))


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    # `ciuic` alone prints the help and exits with 0; no_args_is_help exits with 2 from click 8.2 on.
    no_args_is_help=False,
    invoke_without_command=True,
)
@version_option(__version__)
@global_options
@click.pass_context
def cli(context: click.Context) -> None:
    """Snapshots under a running training job, and an exact way back.

    A snapshot ID may be any unambiguous prefix, "latest", "latest~2", or a time (2h, 14:05, "2023-06-15 15:00": the
    newest snapshot not after it). set:NAME is a set of several hosts.
    """
    if context.invoked_subcommand is None:
        out(context.get_help())


def guarded(session: Session, run: Callable[[], Any]) -> int:
    """Run a command and return its exit code. What went wrong is reported on stderr and, with --json, on stdout."""
    try:
        # A command without an exit code of its own returns None.
        code = run()
        code = code if isinstance(code, int) else 0
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        complain(shown.getvalue().rstrip("\n"))
        code = error.exit_code
        _json_failure(session, error.format_message(), "", code)
    # click raises Abort for ^C during a command, and for ^C and ^D at a question.
    except (KeyboardInterrupt, click.Abort):
        complain("interrupted")
        _tell_what_was_cut_short(session)
        code = INTERRUPTED
        _json_failure(session, "interrupted", "", code)
    except SystemExit as leaving:
        # As the interpreter itself has it: None is a success, and a text a failure.
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except Exception as error:
        code = _failed(session, error)
    finally:
        session.close()
    return code or _flush(session) or session.exit_code


def _tell_what_was_cut_short(session: Session) -> None:
    """Name the command that goes on with a restore: its directory is neither what it was nor what it is to be."""
    if "restore" not in sys.argv[1:]:
        return
    from ciuic.cli.shared.lazy_restore import incomplete_lines

    with suppress(CiuicError, OSError):
        for line in incomplete_lines(session):
            complain(line)


def _failed(session: Session, error: Exception) -> int:
    message, hint, code = explain(error)
    if session.verbosity >= 2:
        import traceback

        complain("".join(traceback.format_exception(error)).rstrip(), prose=False)
    if code == NotPermitted.exit_code:
        hint = "\n".join(filter(None, (hint, _how_sudo_finds_it())))
    # Libraries make their messages printable; what slips through must still not reach a terminal raw. Line by
    # line, because their line breaks are meant.
    complain(styled("error: ", fg="red") + "\n".join(map(shown_text, message.split("\n"))))
    if hint:
        complain("  " + "\n  ".join(map(shown_text, hint.split("\n"))))
    _json_failure(session, message, hint, code)
    return code


def _how_sudo_finds_it() -> str:
    """Return the command to type where sudo's own PATH does not have this program, otherwise ""."""
    # A virtual environment's bin/ is not in sudo's secure_path: `sudo ciuic` answers "command not found"
    # there.
    import shlex

    program = os.path.abspath(sys.argv[0])
    if os.geteuid() == 0 or os.path.dirname(program) in _SUDO_DIRS or not os.access(program, os.X_OK):
        return ""
    return f"sudo has a PATH of its own and may not find ciuic: sudo {shlex.quote(program)} …"


def explain(error: Exception) -> tuple[str, str, int]:
    """Return what happened, what to do next, and the exit code of an exception."""
    if isinstance(error, CiuicError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_working_directory():
        return (
            "a relative path was given, and the current directory does not exist any more",
            "give absolute paths, or change to a directory that exists (cd /)",
            2,
        )
    if isinstance(error, OSError):
        where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
        text = error.strerror or str(error) or type(error).__name__
        message = f"{where}: {text}" if where else text
        if error.errno in (errno.EACCES, errno.EPERM):
            return message, "run it as root" if os.geteuid() else "", 7
        # The repository's disk, as a rule; what cannot be printed on a full disk is no OSError by now
        # (`out`).
        if error.errno == errno.ENOSPC:
            return message, "free some space: `ciuic prune` works on a full disk", 1
        if error.errno == errno.ENOTCONN and where:
            return (
                message,
                "the process that served this mount has ended; ciuic status and ciuic restore --status say which, and what to do",
                1,
            )
        return message, "", 1
    if isinstance(error, MemoryError):
        return "out of memory", "", 1
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("ciuic"):
        # Wrong usage and not a failure: a service that ends with it is not started again until something is changed.
        package = error.name.partition(".")[0]
        return f"the Python package {package} is not installed here", pip_install(), 2
    text = f"unexpected failure, a defect in ciuic: {type(error).__name__}: {error}"
    return text, "run it again with -vv for the details, and report them", 1


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _json_failure(session: Session, message: str, hint: str, code: int) -> None:
    # One document, whatever happens: a command whose document is out has named in it what failed.
    if not session.json or session.printed_json or session.stdout_gone:
        return
    session.printed_json = True
    import json

    try:
        click.echo(json.dumps({"error": message, "hint": hint, "code": code}, indent=2))
    except BrokenPipeError:
        abandon_stdout(session)


def _flush(session: Session) -> int:
    """Write out stdout before exit code 0 is returned: a full disk is an error."""
    try:
        # Not left to the interpreter's end, which would print the exception and exit with 120.
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout(session)
    except OSError as error:
        abandon_stdout(session)
        complain(f"error: the output could not be written: {error.strerror}")
        return 1
    return 0


def run() -> None:
    """Prepare the process and run the command, as the installed program does."""
    if os.geteuid() == 0:
        # Directories and files that root makes anywhere are written by root alone, whatever umask it was started with.
        os.umask(os.umask(0o022) | 0o022)
    for stream in (sys.stdout, sys.stderr):
        # A name or message outside the locale's character set must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    name = os.path.basename(sys.argv[0])
    # One variable for both names of the program: the completion code serves them together.
    cli.main(prog_name="ciuic" if name in ("__main__.py", "-c", "") else name, complete_var=COMPLETE_VARIABLE)
