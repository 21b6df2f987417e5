"""Signals that end a command: each raises KeyboardInterrupt, but only where the exception reaches the command.

Python ignores an exception in a finalizer or in the callback of a weak reference, so that the interrupt is lost. In the callback
that removes the lock of an import (importlib._bootstrap._get_module_lock) it leaves the lock of all imports taken besides, for
which every other thread that imports waits for ever. There the signal is looked at again a little later.
"""

from __future__ import annotations

# `signal` makes enumerations of all numbers (0.5 ms), at the start of each command.
import _signal  # type: ignore[import-not-found]
from types import FrameType
from typing import Final

SIGNALS: Final[tuple[int, ...]] = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)
"""Signals that ask a command to end in good order."""
_AGAIN_SECONDS: Final = 0.001
_FILES: Final = ("<frozen importlib", "weakref.py", "_weakrefset.py")


def raise_interrupts() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread. Called in the main thread; uses SIGALRM."""
    for number in SIGNALS:
        # Not where it is ignored (nohup(1) ignores SIGHUP for its command), nor where the program has a handler of its own.
        if _signal.getsignal(number) in (_signal.SIG_DFL, _signal.default_int_handler):
            _signal.signal(number, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or come back in a millisecond where Python would ignore it. Handler of a signal."""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if code.co_name == "__del__" or file.startswith(_FILES[0]) or file.endswith(_FILES[1:]):
            _signal.signal(_signal.SIGALRM, interrupt)
            _signal.setitimer(_signal.ITIMER_REAL, _AGAIN_SECONDS)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
