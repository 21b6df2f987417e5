"""Values of the configuration: from what TOML or the flat file gave to what the program works with, and back to text.

A parser takes a str, an int, a bool or a list of str and raises ValueError with a sentence; the caller adds where it was written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ciuic.config.model import IoPriority
from ciuic.excludes import check_pattern
from ciuic.retention import MinFree
from ciuic.units import format_size, parse_duration, parse_share, parse_size

MIN_BLOCK_SIZE_BYTES = 4096
MAX_BLOCK_SIZE_BYTES = 8 << 20
_LEAST_SHARE = 0.0001
_MAX_COUNT = 1_000_000
_TAG = re.compile(r"[^\s,|]+\Z")
_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\$?\Z")
# sockaddr_un.sun_path holds 108 bytes, the terminating zero included.
_MAX_SOCKET_PATH_BYTES = 107


def text_value(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text in quotes, not {value!r}")
    return value.strip()


def duration_value(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value != 0:
        raise ValueError(f'a duration needs a unit: "{value}s" for seconds, or m, h, d, w')
    return parse_duration("0" if value == 0 and not isinstance(value, bool) else text_value(value))


def interval_value(value: object) -> int:
    seconds = duration_value(value)
    if seconds < 1:
        raise ValueError("must be at least 1s")
    return seconds


def size_value(value: object) -> int:
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
        else parse_size(text_value(value))
    )


def undo_limit_value(value: object) -> int:
    size_bytes = size_value(value)
    if size_bytes < 1 << 20:
        raise ValueError("must be at least 1MiB: a snapshot could never be finished under a writing job")
    return size_bytes


def min_share_value(value: object) -> float:
    share = parse_share(text_value(value))
    if share < _LEAST_SHARE:
        raise ValueError("must be at least 0.01%: a snapshot has to end")
    return share


def show_share(value: float) -> str:
    return f"{value * 100:g}%"


def block_size_value(value: object) -> int:
    size_bytes = size_value(value)
    if not MIN_BLOCK_SIZE_BYTES <= size_bytes <= MAX_BLOCK_SIZE_BYTES or size_bytes & (size_bytes - 1):
        raise ValueError(f"must be a power of two from 4KiB to 8MiB, not {format_size(size_bytes)}")
    return size_bytes


def count_value(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, got {value!r}")
    if not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"must be from 0 to {_MAX_COUNT}, not {value}")
    return value


def size_or_share_value(value: object) -> MinFree:
    if isinstance(value, str) and value.strip().endswith("%"):
        return MinFree(share=parse_share(value))
    return MinFree(size_bytes=size_value(value))


def show_size_or_share(value: MinFree) -> str:
    return f"{value.share * 100:g}%" if value.share else format_size(value.size_bytes)


def path_value(value: object) -> Path:
    """An absolute path, ``.`` and ``..`` taken out by text."""
    # Not stripped: a directory's name may end in a blank.
    text = value if isinstance(value, str) else text_value(value)
    if not text.startswith("/"):
        raise ValueError(f"must be an absolute path, not {text!r}")
    if "\0" in text:
        raise ValueError(f"a zero byte in the path {text!r}")
    return Path("/" + os.path.normpath(text).lstrip("/"))


def socket_value(value: object) -> Path:
    path = path_value(value)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"too long for a unix socket (at most {_MAX_SOCKET_PATH_BYTES} bytes): {path}")
    return path


def texts_value(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'must be a list of texts, such as ["a", "b"], not {value!r}')
    return tuple(value)


def patterns_value(value: object) -> tuple[str, ...]:
    patterns = texts_value(value)
    for pattern in patterns:
        check_pattern(pattern)
    return patterns


def names_value(value: object) -> tuple[str, ...]:
    names = texts_value(value)
    for name in names:
        if not name or "/" in name or "\0" in name:
            raise ValueError(f'must be patterns of names without a slash, such as ["*.log"], got {name!r}')
    return names


def tags_value(value: object) -> tuple[str, ...]:
    tags = texts_value(value)
    for tag in tags:
        if not _TAG.match(tag):
            raise ValueError(f"not a tag: {tag!r} (no blanks, commas or |)")
    return tags


def account_value(kind: str) -> Callable[[object], str | None]:
    def parse(value: object) -> str | None:
        text = text_value(value)
        if text and not _ACCOUNT.match(text):
            raise ValueError(f"not the name of a {kind}: {text!r}")
        return text or None

    return parse


def users_value(value: object) -> tuple[str, ...]:
    return tuple(user if user == "*" else account_value("user")(user) or "" for user in texts_value(value))


def program_value(value: object) -> tuple[str, ...]:
    words = texts_value(value)
    if words and not words[0].startswith("/"):
        raise ValueError(f"begins with the absolute path of a program, not {words[0]!r}")
    if any("\0" in word for word in words):
        raise ValueError("a zero byte in a word")
    return words


def trainer_name_value(value: object) -> str:
    text = text_value(value)
    if not text or not text.isprintable():
        raise ValueError(f"not a name: {text!r}")
    return text


def io_priority_value(value: object) -> IoPriority:
    text = text_value(value)
    io_class, colon, level = text.partition(":")
    if io_class == "idle" and not colon:
        return IoPriority("idle")
    if io_class == "none" and not colon:
        return IoPriority("none")
    if io_class == "best-effort" and not colon:
        return IoPriority("best-effort", 4)
    if io_class == "best-effort" and re.fullmatch("[0-7]", level):
        return IoPriority("best-effort", int(level))
    raise ValueError(f"must be idle, none, or best-effort:0 to best-effort:7, not {text!r}")


def one_of_value(choices: Sequence[str]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = text_value(value)
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return parse


def flag_value(value: object) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):  # the flat format has text alone
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def show_list(values: Sequence[str]) -> str:
    return ", ".join(values)


def show_optional(value: object) -> str:
    return "" if value is None else str(value)
