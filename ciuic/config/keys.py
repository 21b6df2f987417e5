"""Every key of the configuration in one table: its names, its default, how its text becomes a value.

The documentation, the ``config show`` command, both file formats and the suggestions for typing errors follow
from this table. Parsers take what TOML or the flat file gave (str, int, list of str) and raise ValueError with a
sentence; where it happened is added by the caller.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciuic.config.model import DRIVERS, IoPriority
from ciuic.excludes import check_pattern
from ciuic.retention import MinFree
from ciuic.units import format_duration, format_size, parse_duration, parse_share, parse_size

MIN_BLOCK_SIZE_BYTES = 4096
MAX_BLOCK_SIZE_BYTES = 8 << 20
_LEAST_SHARE = 0.0001
_MAX_COUNT = 1_000_000
_TAG = re.compile(r"[^\s,|]+\Z")
_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\$?\Z")
# sockaddr_un.sun_path holds 108 bytes, the terminating zero included.
_MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True)
class Key:
    """One key: ``table.name`` in TOML, perhaps another name in the flat format."""

    name: str
    parse: Callable[[object], Any]
    default: str
    """As one would write it; empty for none."""
    meaning: str
    flat_name: str = ""
    show: Callable[[Any], str] = str


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text in quotes, not {value!r}")
    return value.strip()


def _duration(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value != 0:
        raise ValueError(f'a duration needs a unit: "{value}s" for seconds, or m, h, d, w')
    return parse_duration("0" if value == 0 and not isinstance(value, bool) else _text(value))


def _interval(value: object) -> int:
    seconds = _duration(value)
    if seconds < 1:
        raise ValueError("must be at least 1s")
    return seconds


def _size(value: object) -> int:
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
        else parse_size(_text(value))
    )


def _undo_limit(value: object) -> int:
    size_bytes = _size(value)
    if size_bytes < 1 << 20:
        raise ValueError("must be at least 1MiB: a snapshot could never be finished under a writing job")
    return size_bytes


def _min_share(value: object) -> float:
    share = parse_share(_text(value))
    if share < _LEAST_SHARE:
        raise ValueError("must be at least 0.01%: a snapshot has to end")
    return share


def _show_share(value: float) -> str:
    return f"{value * 100:g}%"


def _block_size(value: object) -> int:
    size_bytes = _size(value)
    if not MIN_BLOCK_SIZE_BYTES <= size_bytes <= MAX_BLOCK_SIZE_BYTES or size_bytes & (size_bytes - 1):
        raise ValueError(f"must be a power of two from 4KiB to 8MiB, not {format_size(size_bytes)}")
    return size_bytes


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, not {value!r}")
    if not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"must be from 0 to {_MAX_COUNT}, not {value}")
    return value


def _size_or_share(value: object) -> MinFree:
    if isinstance(value, str) and value.strip().endswith("%"):
        return MinFree(share=parse_share(value))
    return MinFree(size_bytes=_size(value))


def _show_size_or_share(value: MinFree) -> str:
    return f"{value.share * 100:g}%" if value.share else format_size(value.size_bytes)


def parse_path(value: object) -> Path:
    """An absolute path, ``.`` and ``..`` taken out by text."""
    # Not stripped: a directory's name may end in a blank.
    text = value if isinstance(value, str) else _text(value)
    if not text.startswith("/"):
        raise ValueError(f"must be an absolute path, not {text!r}")
    if "\0" in text:
        raise ValueError(f"a zero byte in the path {text!r}")
    return Path("/" + os.path.normpath(text).lstrip("/"))


def _socket(value: object) -> Path:
    path = parse_path(value)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"too long for a unix socket (at most {_MAX_SOCKET_PATH_BYTES} bytes): {path}")
    return path


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'must be a list of texts, such as ["a", "b"], not {value!r}')
    return tuple(value)


def _patterns(value: object) -> tuple[str, ...]:
    patterns = _texts(value)
    for pattern in patterns:
        check_pattern(pattern)
    return patterns


def _names(value: object) -> tuple[str, ...]:
    names = _texts(value)
    for name in names:
        if not name or "/" in name or "\0" in name:
            raise ValueError(f'must be patterns of names without a slash, such as ["*.log"], got {name!r}')
    return names


def _tags(value: object) -> tuple[str, ...]:
    tags = _texts(value)
    for tag in tags:
        if not _TAG.match(tag):
            raise ValueError(f"not a tag: {tag!r} (no blanks, commas or |)")
    return tags


def _account(kind: str) -> Callable[[object], str | None]:
    def parse(value: object) -> str | None:
        text = _text(value)
        if text and not _ACCOUNT.match(text):
            raise ValueError(f"not the name of a {kind}: {text!r}")
        return text or None

    return parse


def _users(value: object) -> tuple[str, ...]:
    return tuple(user if user == "*" else _account("user")(user) or "" for user in _texts(value))


def _program(value: object) -> tuple[str, ...]:
    words = _texts(value)
    if words and not words[0].startswith("/"):
        raise ValueError(f"begins with the absolute path of a program, not {words[0]!r}")
    if any("\0" in word for word in words):
        raise ValueError("a zero byte in a word")
    return words


def _trainer_name(value: object) -> str:
    text = _text(value)
    if not text or not text.isprintable():
        raise ValueError(f"not a name: {text!r}")
    return text


def _io_priority(value: object) -> IoPriority:
    text = _text(value)
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


def _one_of(choices: Sequence[str]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = _text(value)
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return parse


def _flag(value: object) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):  # the flat format has text alone
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def _show_list(values: Sequence[str]) -> str:
    return ", ".join(values)


def _show_optional(value: object) -> str:
    return "" if value is None else str(value)


KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key(
            "exclude",
            _patterns,
            "",
            "Paths that are served but not captured, in every root: gitignore syntax, or absolute globs.",
            "exclude_patterns",
            _show_list,
        ),
        Key(
            "repository.path",
            parse_path,
            "",
            "Where snapshots are kept. Default: `.ciuic_snapshots` at the top of the file system that holds the "
            "first root.",
            "snapshot_dir",
            _show_optional,
        ),
        Key(
            "repository.block_size",
            _block_size,
            "256KiB",
            "Size of the blocks of a repository that is yet to be made; a power of two.",
            show=format_size,
        ),
        Key(
            "repository.trust_owner",
            _flag,
            "false",
            "Use the repository although another user owns it, or may replace it.",
            show=lambda value: str(value).lower(),
        ),
        Key(
            "repository.reserve",
            _size_or_share,
            "",
            "Free space on the repository's file system (`20GiB` or `5%`) that captures leave to others. Default: 5% or twice "
            "what others took of it during the last interval, whichever is more.",
            show=_show_size_or_share,
        ),
        Key(
            "schedule.interval",
            _interval,
            "1h",
            "Time between two snapshots (s, m, h, d, w).",
            "snapshot_interval",
            format_duration,
        ),
        Key(
            "retention.keep_within",
            _duration,
            "7d",
            "Keep every snapshot younger than this.",
            "retention_policy",
            format_duration,
        ),
        Key("retention.keep_last", _count, "3", "Keep this many of the newest."),
        Key("retention.keep_hourly", _count, "0", "Keep the newest of each of so many hours that have one."),
        Key("retention.keep_daily", _count, "0", "The same for days."),
        Key("retention.keep_weekly", _count, "0", "The same for weeks, from Monday."),
        Key("retention.keep_monthly", _count, "0", "The same for months."),
        Key("retention.keep_yearly", _count, "0", "The same for years."),
        Key(
            "retention.keep_tags",
            _tags,
            "",
            "Keep every snapshot that has one of these tags.",
            show=_show_list,
        ),
        Key(
            "retention.keep_emergency",
            _count,
            "3",
            "Keep this many of the newest that were taken because a trainer died.",
        ),
        Key(
            "retention.keep_safety",
            _duration,
            "7d",
            "Keep safety snapshots, which restores take first, for this long; the newest three, and those that can still undo a "
            "restore, in any case.",
            show=format_duration,
        ),
        Key(
            "retention.min_free",
            _size_or_share,
            "",
            "Free space on the repository's file system (`50GiB` or `5%`) below which the oldest snapshots go "
            "although a rule keeps them; never the newest, held or tagged ones, except those that an ordinary user holds.",
            show=_show_size_or_share,
        ),
        Key(
            "capture.io_priority",
            _io_priority,
            "idle",
            "I/O class of the capture process: idle, best-effort:N (0 to 7), none.",
            "io_priority",
        ),
        Key(
            "capture.min_share",
            _min_share,
            "1%",
            "How much of the time captures and upkeep work at least while others wait for the disk; it rises to all of it at "
            "`capture.finish_within`. 100%: they are never slowed down.",
            show=_show_share,
        ),
        Key(
            "capture.finish_within",
            _interval,
            "",
            "Time from a cut until its capture is slowed down by nothing any more. Default: a twelfth of `schedule.interval`, "
            "at most 5m.",
            show=format_duration,
        ),
        Key(
            "capture.undo_limit",
            _undo_limit,
            "16GiB",
            "How large a root's undo log may grow before the snapshot in progress is given up.",
            show=format_size,
        ),
        Key(
            "overlay.tracked_names",
            _names,
            "",
            "Names (shell patterns) of logs that programs create and keep open: each write is seen, so that a cut holds "
            "them, at half the speed of a file that passes the overlay. Default: `MANIFEST-*`, `*.log`, `*.jsonl` and more.",
            show=_show_list,
        ),
        Key(
            "overlay.mapped_names",
            _names,
            "",
            "Names of databases that programs write through mappings: they go through the kernel's cache, whoever opens them "
            "first. Default: `*.mdb`, `*.db`, `*.sqlite` and more.",
            show=_show_list,
        ),
        Key(
            "control.socket",
            _socket,
            "/run/ciuic/control.sock",
            "Control socket of the daemon. Default: `control.sock` in `daemon.runtime_dir`.",
        ),
        Key(
            "control.group",
            _account("group"),
            "",
            "Group whose members may use the control socket besides root.",
            show=_show_optional,
        ),
        Key(
            "watch.users",
            _users,
            "",
            'Users whose trainers are watched besides those of root, of `control.group` and of owners of roots; `["*"]`: everybody\'s.',
            show=_show_list,
        ),
        Key(
            "watch.emergency_per_hour",
            _count,
            "3",
            "So many emergency snapshots an hour for one trainer at most, and four times as many in all; 0: none.",
        ),
        Key(
            "holds.max_of_a_user",
            _count,
            "16",
            "How many held snapshots of its roots a user may have at once that is neither root nor in `control.group`; "
            "0: none. Further ones are taken and not held.",
        ),
        Key(
            "holds.max_of_a_user_per_hour",
            _count,
            "8",
            "How many of them such a user may ask for within an hour.",
        ),
        Key(
            "alert.command",
            _program,
            "",
            "Program that is run with each alert, and its arguments: no shell, JSON on its standard input.",
            show=_show_list,
        ),
        Key(
            "alert.user",
            _account("user"),
            "",
            "The user that it is run as; root where there is none.",
            show=_show_optional,
        ),
        Key("alert.timeout", _interval, "30s", "After this it is killed.", show=format_duration),
        Key(
            "daemon.runtime_dir", parse_path, "/run/ciuic", "Where the daemon keeps its sockets and its lock."
        ),
        Key(
            "log.level",
            _one_of(("debug", "info", "warning", "error")),
            "info",
            "debug, info, warning or error.",
        ),
        Key(
            "log.format",
            _one_of(("auto", "json", "text")),
            "auto",
            "json, text, or auto: text on a terminal, json elsewhere.",
        ),
    )
}

ROOT_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("path", parse_path, "", "The directory to protect; absolute."),
        Key("driver", _one_of(DRIVERS), "auto", "auto, kernel or pyfuse3."),
        Key(
            "exclude",
            _patterns,
            "",
            "As the global `exclude`, for this root alone; a leading `/` is the top of the root.",
            show=_show_list,
        ),
    )
}

TRAINER_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("name", _trainer_name, "", "What it is called in status, alerts and messages of snapshots."),
        Key(
            "pid_file", parse_path, "", "File with the number of its process; one that ends well removes it."
        ),
        Key("heartbeat_file", parse_path, "", "File that it writes to or touches while it lives."),
        Key("heartbeat", _interval, "", "How old that file may become.", show=format_duration),
    )
}

FLAT_ROOTS_NAME = "protected_directories"
FLAT_NAMES: dict[str, str] = {key.flat_name: key.name for key in KEYS.values() if key.flat_name}
"""Name in the flat format → dotted name."""
