"""Tests of `ciuic snapshot --wait=remote`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ciuic.cli.commands import snapshot as command
from ciuic.errors import CiuicError


@pytest.mark.parametrize("status", [None, SimpleNamespace(runs=False)])
def test_waiting_ends_where_nothing_uploads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: Any
) -> None:
    """Without a process that uploads it is said soon, and the wait ends with what to start."""
    session = SimpleNamespace(
        config=SimpleNamespace(remotes=[SimpleNamespace(name="nas")]), repository=SimpleNamespace(id="r")
    )
    monkeypatch.setattr(command, "_is_stored", lambda *_: False)
    monkeypatch.setattr(command, "_upload_status", lambda _: status)
    for name in ("_PATIENCE_SECONDS", "_UNSERVED_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(command, name, 0.0)
    with pytest.raises(CiuicError, match="nothing uploads to the remote nas") as caught:
        command.RemoteWait(cast("Any", session)).until_stored("cs-abc123")
    assert "ciuic service install" in caught.value.hint
    assert "nothing seems to upload to the remote nas" in capsys.readouterr().err
