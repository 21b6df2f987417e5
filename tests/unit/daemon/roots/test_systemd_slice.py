"""Tests that the capture slice is used only where it was seen to work."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.daemon.base.process_priority import SLICE, slice_prefix

UNDER_SYSTEMD = {"INVOCATION_ID": "x"}


def program(directory: Path, text: str) -> str:
    path = directory / "systemd-run"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_that_becomes_the_command_is_used(tmp_path: Path) -> None:
    """A program that execs the command, with the same process and descriptors, is used with the slice."""
    run = program(tmp_path, 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    prefix = slice_prefix(UNDER_SYSTEMD, systemd_run=run)
    assert prefix[0] == run
    assert f"--slice={SLICE}" in prefix


@pytest.mark.parametrize(
    "text",
    [
        "exit 1",
        # The command is a child of its own, which a kill would miss.
        'while [ "$1" != -- ]; do shift; done; shift; "$@"; true',
        # The program closes descriptors.
        'while [ "$1" != -- ]; do shift; done; shift; for f in /proc/self/fd/*; do n=${f##*/}; '
        '[ $n -gt 2 ] && eval "exec $n>&-"; done; exec "$@"',
    ],
)
def test_unsuitable_programs_are_not_used(tmp_path: Path, text: str) -> None:
    """A program that refuses, forks or closes the descriptors is not used, and captures run without slice."""
    assert slice_prefix(UNDER_SYSTEMD, systemd_run=program(tmp_path, text)) == ()


def test_a_missing_program_is_no_error(tmp_path: Path) -> None:
    """The command has no prefix without systemd-run."""
    assert slice_prefix(UNDER_SYSTEMD, systemd_run=str(tmp_path / "none")) == ()


def test_outside_systemd_nothing_is_tried(tmp_path: Path) -> None:
    """Captures in a terminal or container start without a slice, and nothing is tried."""
    run = program(tmp_path, f"touch {tmp_path}/ran")
    assert slice_prefix({}, systemd_run=run) == ()
    assert not (tmp_path / "ran").exists()
