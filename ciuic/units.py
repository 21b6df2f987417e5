"""Durations and sizes as people write them: parse, format and round.

Guarantees: `parse_duration` and `parse_size` read what `format_duration` and `format_size` return as exactly
the same number. `human_size` and `human_duration` round, and are for tables alone. Durations are whole
seconds, sizes whole bytes; a bare number has no unit and is refused, except 0. Which values make sense for a
setting is the caller's question. Raises ValueError with a sentence that the operator can act on.
"""

from __future__ import annotations

import re

SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}

# ASCII, because \d otherwise takes the digits of every script. Compiled with the first use, of which `re` keeps the
# result: every command imports this module, and few of them parse anything.
_DURATION_PART = r"(?a)(\d+)\s*([smhdw])"
_DURATION = r"(?a)(?:\d+\s*[smhdw]\s*)+"
_SIZE = r"(?ai)(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?B)?|B)?"
_PERCENT = r"(?a)(\d+(?:\.\d+)?)\s*%"

# A longer duration is a slip of the hand, and would overflow a nanosecond clock (292 years).
_MAX_DURATION_SECONDS = 200 * 365 * 86400
# Sizes are signed 64-bit numbers for the kernel and for SQLite.
_MAX_SIZE_BYTES = 1 << 63


def parse_duration(text: str) -> int:
    """Return the seconds of ``90s``, ``15m``, ``1h``, ``7d``, ``2w`` or ``1h30m``; ``0`` needs no unit."""
    text = text.strip()
    # 0 turns a setting off, and means the same in every unit.
    if text == "0":
        return 0
    if not re.fullmatch(_DURATION, text):
        raise ValueError(
            f"not a duration: {text!r} (write a number and a unit: 90s, 15m, 1h, 7d, 2w or 1h30m)"
        )
    seconds = sum(int(number) * SECONDS_PER_UNIT[unit] for number, unit in re.findall(_DURATION_PART, text))
    if seconds > _MAX_DURATION_SECONDS:
        raise ValueError(f"duration too long: {text!r} (at most 200 years)")
    return seconds


def format_duration(seconds: int) -> str:
    """Return the text that `parse_duration` reads back as ``seconds`` (≥ 0): ``1h``, ``1h30m``, ``7d``."""
    if seconds < 0:
        raise ValueError(f"a duration must not be negative, got {seconds}")
    if seconds == 0:
        return "0s"
    # One week is written as 7d.
    if seconds % SECONDS_PER_UNIT["w"] == 0 and seconds >= 2 * SECONDS_PER_UNIT["w"]:
        return f"{seconds // SECONDS_PER_UNIT['w']}w"
    parts = []
    for unit in "dhms":
        count, seconds = divmod(seconds, SECONDS_PER_UNIT[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def human_duration(seconds: float) -> str:
    """Return a rounded duration in at most two units, for a table: ``37m``, ``2h05m``, ``3d04h``."""
    if seconds < 0:
        return "-" + human_duration(-seconds)
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def parse_size(text: str) -> int:
    """Return the bytes of ``4096``, ``64K``, ``10GiB`` (1024) or ``10GB`` (1000), as in GNU coreutils."""
    text = text.strip()
    match = re.fullmatch(_SIZE, text)
    if not match:
        raise ValueError(f"not a size: {text!r} (write for example 512MiB, 10G, 1.5TB)")
    number, prefix, suffix = match.groups()
    factor = 1
    if prefix:
        # As in GNU coreutils: K and KiB are 1024, KB is 1000.
        decimal = suffix is not None and suffix.lower() == "b"
        factor = (_DECIMAL if decimal else _BINARY)[prefix.upper()]
    whole, _, fraction = number.partition(".")
    if fraction and not prefix:
        raise ValueError(f"not a size: {text!r} (a byte cannot be divided)")
    size_bytes = int(whole) * factor
    if fraction:
        # Integers, because a float has only 53 bits.
        size_bytes += int(fraction) * factor // 10 ** len(fraction)
    if size_bytes >= _MAX_SIZE_BYTES:
        raise ValueError(f"size too large: {text!r}")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Return the text that `parse_size` reads as ``size_bytes`` (≥ 0): ``256KiB``, ``10GiB``, ``1000B``."""
    if size_bytes < 0:
        raise ValueError(f"a size must not be negative, got {size_bytes}")
    for prefix in "PTGMK":
        if size_bytes and size_bytes % _BINARY[prefix] == 0:
            return f"{size_bytes // _BINARY[prefix]}{prefix}iB"
    return f"{size_bytes}B"


def human_size(size_bytes: float) -> str:
    """Return a rounded size of three digits, in binary units: ``0 B``, ``1.25 GiB``, ``512 MiB``."""
    if size_bytes < 0:
        return "-" + human_size(-size_bytes)
    if size_bytes < 1024:
        return f"{int(size_bytes)} B"
    value = float(size_bytes)
    value, exponent = value / 1024, 1
    # 1023.5 and more would be printed as 1024, which belongs to the next unit.
    while value >= 1023.5 and exponent < 6:
        value /= 1024
        exponent += 1
    # From these values on, rounding would print a fourth digit.
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {' KMGTPE'[exponent]}iB"


def parse_share(text: str) -> float:
    """Return the fraction 0 … 1 that ``5%`` or ``2.5 %`` means."""
    match = re.fullmatch(_PERCENT, text.strip())
    if not match:
        raise ValueError(f"not a share: {text!r} (write for example 5%)")
    percent = float(match.group(1))
    if percent > 100:
        raise ValueError(f"a share must not be more than the whole, got {text!r}")
    return percent / 100


def plural(number: int, one: str, many: str = "") -> str:
    """Return ``1 file`` or ``2 files``; ``many`` is an irregular plural: ``plural(2, "is", "are")``."""
    return f"{number} {one if number == 1 else many or one + 's'}"
