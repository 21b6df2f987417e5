"""Tests of what is said of a safety snapshot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest

from ciuic.cli.shared.safety_snapshot import is_over
from ciuic.cli.shared.session import Session
from ciuic.compare.restore_records import record_restore


def test_the_undo_of_a_resumed_restore_leads_before_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that is named takes back the run that was cut short as well, as `ciuic undo` alone does."""
    record_restore(tmp_path, "cs-000001", [b"/r"], ["cs-000001"])
    record_restore(tmp_path, "cs-000002", [b"/r"], ["cs-000001", "cs-000002"], "cs-000001")
    with click.Context(click.Command("restore"), obj=Session()):
        is_over(cast("Any", SimpleNamespace(repository_dir=tmp_path)), "cs-000002", changed=True)
    assert "ciuic undo cs-000001" in capsys.readouterr().err
