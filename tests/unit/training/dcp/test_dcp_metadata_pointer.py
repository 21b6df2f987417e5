"""`.metadata` of a checkpoint's directory: what it names comes back, and anything else is refused."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251  torch's own
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.training.dcp.metadata import (
    CheckpointPointer,
    decode_checkpoint_pointer,
    pointer_path,
    read_checkpoint_pointer,
    write_checkpoint_pointer,
)

TEXT = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=200)
POINTER = st.builds(CheckpointPointer, TEXT, TEXT, TEXT, TEXT)
SAMPLE = CheckpointPointer("ciuic", "dcp", "0f", "/checkpoints/step-1")


@given(POINTER)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, pointer: CheckpointPointer
) -> None:
    """A pointer of any texts, surrogates of undecodable paths included, comes back equal."""
    file = pointer_path(tmp_path_factory.mktemp("checkpoint"))
    write_checkpoint_pointer(file, pointer)
    assert read_checkpoint_pointer(file) == pointer
    assert sorted(os.listdir(file.parent)) == [".metadata"]


@given(st.sampled_from(CheckpointPointer._fields), st.none() | st.integers() | st.just("") | st.just("a\0b"))
def test_a_value_that_is_no_text_is_refused(field: str, value: Any) -> None:
    """A missing, empty or non-text value is a ValueError that says what was expected."""
    document = {"version": 1, **SAMPLE._asdict(), field: value}
    with pytest.raises(ValueError, match="malformed: expected the texts"):
        decode_checkpoint_pointer(json.dumps(document).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"version": 2}', b"[" * 60_000, b" " * 70_000, b"\xff"]
)
def test_other_content_is_refused(data: bytes) -> None:
    """Other documents, later versions and what is no JSON are a ValueError."""
    with pytest.raises(ValueError, match=r"\.metadata"):
        decode_checkpoint_pointer(data)


class _Called:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["CALLED"],)


def test_a_pickle_is_refused_without_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickle that torch's own writer leaves is refused by name, and nothing in it runs."""
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    file = pointer_path(tmp_path)
    file.write_bytes(pickle.dumps(_Called()))
    with pytest.raises(ValueError, match="is a pickle of torch's FileSystemWriter"):
        read_checkpoint_pointer(file)
    assert not (tmp_path / "called").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A symbolic link in place of the file is refused: another user's directory leads no reader elsewhere."""
    write_checkpoint_pointer(tmp_path / "elsewhere", SAMPLE)
    pointer_path(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="regular file"):
        read_checkpoint_pointer(pointer_path(tmp_path))
