"""Attacker: another host of a set, which is started over ssh and says or waits what it wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.cli.shared import set_of_hosts
from ciuic.cli.shared.set_of_hosts import OtherHosts
from ciuic.errors import Partial


def _ssh(tmp_path: Path, script: str) -> dict[str, str]:
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"CIUIC_SSH_COMMAND": str(program), "PATH": "/usr/bin:/bin"}


def test_a_host_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that says much and does not end costs its part of the set, within a limit of time."""
    monkeypatch.setattr(set_of_hosts, "_CUT_SECONDS", 0.5)
    with OtherHosts(("a", "b"), "a", [], _ssh(tmp_path, "exec yes")) as others:
        with pytest.raises(Partial, match="no end within"):
            others.finish()
        assert all(len(said.text()) <= 64 << 10 for said in others._said["b"])


def test_what_a_host_says_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last lines of a failed host's 64 MB of output are kept and shown."""
    told: list[str] = []
    monkeypatch.setattr(set_of_hosts, "note", told.append)
    script = "yes | head -c 64000000 >&2; echo last words >&2; exit 3"
    with OtherHosts(("a", "b"), "a", [], _ssh(tmp_path, script)) as others:
        with pytest.raises(Partial, match="exit code 3"):
            others.finish()
        assert len(others._said["b"][1].text()) <= 64 << 10
    assert told[-1] == "b: last words"
    assert len(told) <= 10
