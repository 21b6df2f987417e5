"""Tests of which checkpoints of Lightning count as removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.integrations.checkpoint_pointer import Pointer, write_pointer
from ciuic.integrations.lightning_parts import _is_lost


def test_only_what_is_certainly_gone_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is lost when its file is gone or names another one, not when it cannot be read."""
    path = tmp_path / "files" / "last.ckpt"
    assert not _is_lost(str(path), ["mine"]), "the directory may not be mounted"
    path.parent.mkdir()
    assert _is_lost(str(path), ["mine"])
    write_pointer(path, Pointer("mine", str(tmp_path)))
    assert not _is_lost(str(path), ["mine"])
    assert _is_lost(str(path), ["other"])
    path.write_bytes(b"damaged")
    assert not _is_lost(str(path), ["mine"])
    path.unlink()
    path.symlink_to(path.name)
    assert not _is_lost(str(path), ["mine"]), "a link that leads nowhere is there"
