"""Durations and sizes as people write them, and back again.

Guarantees: what ``format_duration`` and ``format_size`` return is read back by ``parse_duration`` and
``parse_size`` as exactly the same number. ``human_size`` rounds and is for tables alone. Durations are whole
seconds, sizes whole bytes; a bare number has no unit and is refused, except 0. Leaves the question of which
values make sense for a setting to the caller. Raises ValueError with a sentence a person can act on.
"""

from __future__ import annotations

import re

SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}

_DURATION_PART = re.compile(r"(\d+)\s*([smhdw])", re.ASCII)
_DURATION = re.compile(r"(?:\d+\s*[smhdw]\s*)+", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?B)?|B)?", re.ASCII | re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)

# Beyond this a number is a slip of the hand, and would overflow a nanosecond clock (292 years).
_MAX_DURATION_SECONDS = 200 * 365 * 86400
_MAX_SIZE_BYTES = 1 << 63


def parse_duration(text: str) -> int:
    """Whole seconds of ``90s``, ``15m``, ``1h``, ``7d``, ``2w`` or ``1h30m``; ``0`` needs no unit."""
    text = text.strip()
    if text == "0":
        return 0
    if not _DURATION.fullmatch(text):
        raise ValueError(
            f"not a duration: {text!r} (write a number and a unit: 90s, 15m, 1h, 7d, 2w or 1h30m)"
        )
    seconds = sum(int(number) * SECONDS_PER_UNIT[unit] for number, unit in _DURATION_PART.findall(text))
    if seconds > _MAX_DURATION_SECONDS:
        raise ValueError(f"duration too long: {text!r} (at most 200 years)")
    return seconds


def format_duration(seconds: int) -> str:
    """The text that ``parse_duration`` reads back as ``seconds`` (≥ 0): ``1h``, ``1h30m``, ``7d``."""
    if seconds < 0:
        raise ValueError(f"a duration is not negative: {seconds}")
    if seconds == 0:
        return "0s"
    if seconds % SECONDS_PER_UNIT["w"] == 0 and seconds >= 2 * SECONDS_PER_UNIT["w"]:
        return f"{seconds // SECONDS_PER_UNIT['w']}w"
    parts = []
    for unit in "dhms":
        count, seconds = divmod(seconds, SECONDS_PER_UNIT[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def human_duration(seconds: float) -> str:
    """About how long, in at most two units, for a table: ``37m``, ``2h05m``, ``3d04h``."""
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
    """Bytes of ``4096``, ``64K``, ``10GiB`` (1024) or ``10GB`` (1000), as GNU coreutils read them."""
    text = text.strip()
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError(f"not a size: {text!r} (write for example 512MiB, 10G, 1.5TB)")
    number, prefix, suffix = match.groups()
    factor = 1
    if prefix:
        decimal = suffix is not None and suffix.lower() == "b"
        factor = (_DECIMAL if decimal else _BINARY)[prefix.upper()]
    whole, _, fraction = number.partition(".")
    if fraction and not prefix:
        raise ValueError(f"not a size: {text!r} (a byte cannot be divided)")
    size_bytes = int(whole) * factor
    if fraction:
        size_bytes += int(fraction) * factor // 10 ** len(fraction)
    if size_bytes >= _MAX_SIZE_BYTES:
        raise ValueError(f"size too large: {text!r}")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """The text that ``parse_size`` reads back as ``size_bytes`` (≥ 0): ``256KiB``, ``10GiB``, ``1000B``."""
    if size_bytes < 0:
        raise ValueError(f"a size is not negative: {size_bytes}")
    for prefix in "PTGMK":
        if size_bytes and size_bytes % _BINARY[prefix] == 0:
            return f"{size_bytes // _BINARY[prefix]}{prefix}iB"
    return f"{size_bytes}B"


def human_size(size_bytes: float) -> str:
    """About how much, three digits, binary units, for a table: ``0 B``, ``1.25 GiB``, ``512 MiB``."""
    if size_bytes < 0:
        return "-" + human_size(-size_bytes)
    if size_bytes < 1024:
        return f"{int(size_bytes)} B"
    value = float(size_bytes)
    value, exponent = value / 1024, 1
    # 1023.5 and more would be printed as 1024: it belongs to the next unit.
    while value >= 1023.5 and exponent < 6:
        value /= 1024
        exponent += 1
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {' KMGTPE'[exponent]}iB"


def parse_share(text: str) -> float:
    """The fraction 0 … 1 that ``5%`` or ``2.5 %`` means."""
    match = _PERCENT.fullmatch(text.strip())
    if not match:
        raise ValueError(f"not a share: {text!r} (write for example 5%)")
    percent = float(match.group(1))
    if percent > 100:
        raise ValueError(f"more than the whole: {text!r}")
    return percent / 100


def plural(number: int, one: str, many: str = "") -> str:
    """Return ``1 file`` or ``2 files``. ``many`` is for what takes no ``s``: ``plural(2, "was open", "were open")``."""
    return f"{number} {one if number == 1 else many or one + 's'}"
