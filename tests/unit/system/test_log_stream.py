"""Tests that a log that cannot be written loses its lines and nothing else."""

from __future__ import annotations

import io
import os

from ciuic.system.logs import LogStream


def test_a_reader_that_is_gone_costs_the_lines_alone() -> None:
    """A pipe without a reader loses lines without an exception."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as raw:
        log = LogStream(io.TextIOWrapper(raw, line_buffering=True))
        for _ in range(3):
            log.write("line\n")
            log.flush()
        assert not log.isatty()


def test_lines_reach_a_reader() -> None:
    """Lines reach a reader as they were written."""
    file = io.StringIO()
    log = LogStream(file)
    assert log.write("line\n") == 5
    log.flush()
    assert file.getvalue() == "line\n"
