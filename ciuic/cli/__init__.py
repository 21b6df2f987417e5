"""The command line: one module a command, imported when that command runs. The contract for its users is docs/cli.md.

Guarantees: ``main`` ends the process with an exit code of docs/cli.md and never with a traceback, unless ``-vv`` asked.
Leaves all the work to the library; only `commands.daemon` imports ``ciuic.daemon``.
"""

from __future__ import annotations

# Modules that are loaded already: until `main` runs ^C is answered by the interpreter, with a traceback.
import _signal  # type: ignore[import-not-found]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

# 128 + SIGINT, as shells report it. One code for all three signals: each is a request to end in good order.
INTERRUPTED: Final = 130
"""Exit code of a command that ^C, SIGTERM or SIGHUP ended."""
COMPLETE_VARIABLE: Final = "_CIUIC_COMPLETE"
"""Environment variable by which a shell asks for the candidates for a word (`ciuic.cli.shared.completion`)."""


def main() -> None:
    """Run the installed ``ciuic`` or ``ciuric``."""
    # Before anything is imported: the interpreter's own handler raises within the locks of an import, too. `signal` imports enum.
    is_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if is_ours:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        from ciuic.system.interrupts import raise_interrupts

        if is_ours:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        raise_interrupts()
        _open_missing_streams()
        _run()
    except SystemExit as leaving:
        _leave(leaving)
    except KeyboardInterrupt:
        # During the imports, or a second ^C while the first one is reported: nothing is left to say.
        _leave(SystemExit(INTERRUPTED))


def _open_missing_streams() -> None:
    """Open /dev/null in the place of each standard stream that the caller closed."""
    # Otherwise the first file of the repository that is opened gets the number 1 or 2, and what a child
    # process prints is written into it. One after the other: open(2) returns the lowest number that is free,
    # and the descriptor is inherited as these are.
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                null = os.open(os.devnull, os.O_RDWR)
                os.set_inheritable(null, True)
            # closefd=False, as in the streams that the interpreter makes: the number stays taken if the
            # object is replaced.
            setattr(sys, name, open(number, mode, closefd=False))


def _run() -> None:
    if sys.argv[1:2] != ["daemon"]:
        import gc

        # Commands end soon: looking for cycles while they import takes 8 ms of 170. The daemon runs for
        # weeks, and keeps the default.
        gc.set_threshold(50_000)
    # A training waits for this command between two steps. Its plain forms avoid click, configuration and
    # msgspec: from command to commit 52 ms in place of about 100 (docs/decisions/snapshot-of-nothing.md).
    if sys.argv[1:2] == ["snapshot"]:
        from ciuic.cli.fast_snapshot import run as run_quickly

        status = run_quickly(sys.argv[1:], os.environ)
        if status is not None:
            # All is written, nothing is open: 6 ms to take the interpreter down would be for nothing.
            os._exit(status)
    from ciuic.cli.app import run

    run()


def _leave(leaving: SystemExit) -> None:
    """End the process without finalizing the interpreter, unless something is still at work or watches the run."""
    # All is closed and written by now, and finalization takes 15 ms of the 185 of a `prune`.
    import threading

    # A text is the interpreter's to print. A tracer or coverage writes its figures during finalization, and
    # another thread may be in the middle of a write.
    code = leaving.code
    watched = sys.gettrace() is not None or "coverage" in sys.modules
    # Of an interrupted command these are reads that are left alone: where a store hangs they wait for minutes.
    at_work = threading.active_count() > 1 and code != INTERRUPTED
    if not isinstance(code, int) or watched or at_work:
        raise leaving
    # os._exit flushes no buffer.
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        raise leaving from None
    os._exit(code)
