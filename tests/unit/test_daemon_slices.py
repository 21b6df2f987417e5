"""The capture slice is used only where it was seen to work."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.daemon.slices import SLICE, slice_prefix

UNDER_SYSTEMD = {"INVOCATION_ID": "x"}


def program(directory: Path, text: str) -> str:
    path = directory / "systemd-run"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_that_becomes_the_command_is_used(tmp_path: Path) -> None:
    """Same process, same descriptors: the prefix is taken, with the slice in it."""
    run = program(tmp_path, 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    prefix = slice_prefix(UNDER_SYSTEMD, systemd_run=run)
    assert prefix[0] == run
    assert f"--slice={SLICE}" in prefix


@pytest.mark.parametrize(
    "text",
    [
        "exit 1",
        'while [ "$1" != -- ]; do shift; done; shift; "$@"; true',  # a child of its own: killing it would miss
        'while [ "$1" != -- ]; do shift; done; shift; for f in /proc/self/fd/*; do n=${f##*/}; '
        '[ $n -gt 2 ] && eval "exec $n>&-"; done; exec "$@"',  # descriptors closed
    ],
)
def test_anything_else_is_not_used(tmp_path: Path, text: str) -> None:
    """Refused, forked, or without the descriptors: captures run without the slice."""
    assert slice_prefix(UNDER_SYSTEMD, systemd_run=program(tmp_path, text)) == ()


def test_a_missing_program_is_no_error(tmp_path: Path) -> None:
    """Without systemd-run nothing is put before the command."""
    assert slice_prefix(UNDER_SYSTEMD, systemd_run=str(tmp_path / "none")) == ()


def test_outside_systemd_nothing_is_tried(tmp_path: Path) -> None:
    """A daemon in a terminal or container starts its captures as they are."""
    run = program(tmp_path, f"touch {tmp_path}/ran")
    assert slice_prefix({}, systemd_run=run) == ()
    assert not (tmp_path / "ran").exists()
