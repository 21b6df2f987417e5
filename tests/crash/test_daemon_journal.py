"""Replacing the daemon's journals, interrupted at every step: a successor reads the old or the new ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ciuic.daemon.base.runtime import CutRecord, PendingRecord, RuntimeDirectory
from ciuic.daemon.snapshots.cut import TrackingTrust


class Killed(BaseException):
    """Raised in place of the daemon's death."""


def _pending(number: int) -> list[PendingRecord]:
    return [
        PendingRecord(
            id=f"cs-{number}", time_ns=number, cuts=[CutRecord(path="/a", session="s", epoch=number)]
        )
    ]


@contextmanager
def _stopped_at(step: str, error: BaseException) -> Iterator[None]:
    """Stop at the named step: it is not done, or half done if it is the write."""

    def fail(*args: Any, **_: Any) -> Any:
        if step == "write":
            fd, (data,), offset = args
            os.pwrite(fd, data[: len(data) // 2], offset)
        raise error

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "pwritev" if step == "write" else step, fail))
        if isinstance(error, Killed):
            # What is dead takes nothing back.
            stack.enter_context(mock.patch.object(os, "unlink", mock.Mock(side_effect=error)))
        yield


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "full")], ids=["killed", "full"])
@pytest.mark.parametrize("step", ["unlink", "open", "write", "rename"])
def test_a_successor_reads_the_old_journal(short_tmp: Path, step: str, error: BaseException) -> None:
    """Both journals read as before, and can be replaced again, after a failure at any step."""
    runtime = RuntimeDirectory(short_tmp)
    runtime.write_pending(_pending(1))
    runtime.write_untrusted({"/a"})
    for write in (lambda: runtime.write_pending(_pending(2)), lambda: runtime.write_untrusted(set())):
        if step == "unlink":
            for name in ("pending.json.tmp", "untrusted.json.tmp"):
                (short_tmp / name).touch()
        with suppress(Killed, OSError), _stopped_at(step, error):
            write()
            pytest.fail("the step was not reached")
    successor = RuntimeDirectory(short_tmp)
    assert successor.read_pending() == _pending(1)
    assert successor.read_untrusted() == {"/a"}
    successor.write_pending(_pending(3))
    successor.write_untrusted({"/b"})
    assert successor.read_pending() == _pending(3)
    assert successor.read_untrusted() == {"/b"}


class _Bypass:
    has_gap = False


class _Root:
    def __init__(self) -> None:
        self.bypass = _Bypass()


def test_an_unreadable_list_of_gaps_compares_every_root_in_full(short_tmp: Path) -> None:
    """Every root is compared in full if the list of gaps is unreadable; without a list no root has a gap."""
    runtime, roots = RuntimeDirectory(short_tmp), {"/a": _Root(), "/b": _Root()}
    trust = TrackingTrust(lambda: roots, runtime)  # type: ignore[arg-type, return-value]
    trust.take_over(runtime.read_untrusted())
    assert not any(root.bypass.has_gap for root in roots.values())
    (short_tmp / "untrusted.json").write_text('["/')
    trust.take_over(runtime.read_untrusted())
    assert all(root.bypass.has_gap for root in roots.values())
    assert runtime.read_untrusted() == {"/a", "/b"}
