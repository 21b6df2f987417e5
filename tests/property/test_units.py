"""Tests that units read back exactly what they print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.units import (
    format_duration,
    format_size,
    human_duration,
    human_size,
    parse_duration,
    parse_share,
    parse_size,
)


@given(st.integers(min_value=0, max_value=200 * 365 * 86400))
def test_durations_round_trip(seconds: int) -> None:
    """Every duration is read back as the number it was printed from."""
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=(1 << 63) - 1) | st.integers(0, 1 << 20).map(lambda n: n << 30))
def test_sizes_round_trip(size_bytes: int) -> None:
    """Every size is read back as the number it was printed from."""
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(min_value=1, max_value=1 << 62))
def test_human_size_is_within_one_percent(size_bytes: int) -> None:
    """The rounded size is off by less than one percent and never prints 1024 of a unit."""
    number, unit = human_size(size_bytes).split()
    factor = 1 << (10 * ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit))
    assert abs(float(number) * factor - size_bytes) <= size_bytes * 0.01
    assert float(number) < 1024


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("1h", 3600),
        ("7d", 604800),
        ("2w", 1209600),
        ("1h30m", 5400),
        (" 1 d ", 86400),
        ("0", 0),
    ],
)
def test_durations_as_written(text: str, seconds: int) -> None:
    """Each duration unit has the meaning documented in cli.md."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "h", "1.5h", "1y", "-1h", "1h-", "1 hour", "٣h", "9" * 30 + "d"])
def test_invalid_durations_are_refused(text: str) -> None:
    """An invalid duration is refused with the text in the message."""
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("64K", 65536),
        ("64KiB", 65536),
        ("10GB", 10**10),
        ("10G", 10 << 30),
        ("1.5 TiB", 3 << 39),
        ("512 B", 512),
        ("10gib", 10 << 30),
    ],
)
def test_sizes_as_written(text: str, size_bytes: int) -> None:
    """Size prefixes are binary, and decimal with a bare B, as in GNU coreutils."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "K", "1.5", "-1G", "1Q", "1e9", "9" * 30])
def test_invalid_sizes_are_refused(text: str) -> None:
    """An invalid size is refused with the text in the message."""
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_percentages_become_fractions() -> None:
    """Percentages become fractions, and more than the whole is refused."""
    assert parse_share("5%") == 0.05
    with pytest.raises(ValueError, match="whole"):
        parse_share("101%")


def test_human_durations_have_two_units_at_most() -> None:
    """A human-readable duration has two units at most."""
    assert [human_duration(s) for s in (5, 2220, 7500, 273600)] == ["5s", "37m", "2h05m", "3d04h"]
