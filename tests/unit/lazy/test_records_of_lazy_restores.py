"""Records of lazy restores, which another version of ciuic may go on with."""

from __future__ import annotations

import json

import pytest

from ciuic.lazy.service import LazyRecord


@pytest.mark.parametrize("version", [1, 2])
def test_a_restore_that_goes_on_is_one_with_journals(version: int) -> None:
    """A record of the version without journals is taken over as one with them, which versions without them refuse."""
    data = json.loads(LazyRecord(snapshot="cs-000001", source="2f72", special=False).encode())
    data["version"] = version
    assert json.loads(LazyRecord.decode(json.dumps(data).encode()).encode())["version"] == 2


def test_a_record_of_a_later_version_is_refused() -> None:
    """A record that this version may not understand is not gone on with."""
    data = json.loads(LazyRecord(snapshot="cs-000001", source="2f72", special=False).encode())
    data["version"] = 3
    with pytest.raises(ValueError, match="must be 1 or 2, got 3"):
        LazyRecord.decode(json.dumps(data).encode())
