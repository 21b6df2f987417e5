"""The daemon's journals, stopped or failing at every step of being replaced: a successor reads the old one or the new one."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ciuic.daemon import runtime as runtime_module
from ciuic.daemon.runtime import CutRecord, PendingRecord, RuntimeDirectory
from ciuic.daemon.trust import Trust


class Killed(BaseException):
    """The daemon ends here."""


def _pending(number: int) -> list[PendingRecord]:
    return [
        PendingRecord(
            id=f"cs-{number}", time_ns=number, cuts=[CutRecord(path="/a", session="s", epoch=number)]
        )
    ]


@contextmanager
def _stopped_at(step: str, error: BaseException) -> Iterator[None]:
    """The named step is not done, or half done where it is the write."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    def open_torn(*args: Any, **options: Any) -> io.FileIO:
        class Torn(io.FileIO):
            def write(self, data: Any) -> int:
                super().write(bytes(data)[: len(data) // 2])
                raise error

        if step == "open":
            raise error
        return Torn(args[0], "xb", opener=options["opener"])

    if step in ("unlink", "rename"):
        with mock.patch.object(Path, step, fail):
            yield
    else:
        with mock.patch.object(runtime_module, "open", open_torn, create=True):
            yield


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "full")], ids=["killed", "full"])
@pytest.mark.parametrize("step", ["unlink", "open", "write", "rename"])
def test_a_successor_reads_the_old_journal(short_tmp: Path, step: str, error: BaseException) -> None:
    """Whatever step of replacing them was the last, both journals are what they were, and can be replaced again."""
    runtime = RuntimeDirectory(short_tmp)
    runtime.write_pending(_pending(1))
    runtime.write_untrusted({"/a"})
    for write in (lambda: runtime.write_pending(_pending(2)), lambda: runtime.write_untrusted(set())):
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


class _Root:
    untrusted = False


def test_an_unreadable_list_of_gaps_trusts_nobody(short_tmp: Path) -> None:
    """Where it is not known whose tracking has a gap, every root is compared; where there is no list, none has one."""
    runtime, roots = RuntimeDirectory(short_tmp), {"/a": _Root(), "/b": _Root()}
    trust = Trust(lambda: roots, runtime)  # type: ignore[arg-type, return-value]
    trust.take_over(runtime.read_untrusted())
    assert not any(root.untrusted for root in roots.values())
    (short_tmp / "untrusted.json").write_text('["/')
    trust.take_over(runtime.read_untrusted())
    assert all(root.untrusted for root in roots.values())
    assert runtime.read_untrusted() == {"/a", "/b"}
