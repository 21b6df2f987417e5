"""Every key of the configuration in one table: its names, its default, how its text becomes a value.

The documentation, the ``config show`` command, both file formats and the suggestions for typing errors follow
from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ciuic.config.model import DRIVERS
from ciuic.config.values import (
    account_value,
    block_size_value,
    count_value,
    duration_value,
    flag_value,
    interval_value,
    io_priority_value,
    min_share_value,
    names_value,
    one_of_value,
    path_value,
    patterns_value,
    program_value,
    show_list,
    show_optional,
    show_share,
    show_size_or_share,
    size_or_share_value,
    socket_value,
    tags_value,
    trainer_name_value,
    undo_limit_value,
    users_value,
)
from ciuic.units import format_duration, format_size


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


KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key(
            "exclude",
            patterns_value,
            "",
            "Paths that are served but not captured, in every root: gitignore syntax, or absolute globs.",
            "exclude_patterns",
            show_list,
        ),
        Key(
            "repository.path",
            path_value,
            "",
            "Where snapshots are kept. Default: `.ciuic_snapshots` at the top of the file system that holds the "
            "first root.",
            "snapshot_dir",
            show_optional,
        ),
        Key(
            "repository.block_size",
            block_size_value,
            "256KiB",
            "Size of the blocks of a repository that is yet to be made; a power of two.",
            show=format_size,
        ),
        Key(
            "repository.trust_owner",
            flag_value,
            "false",
            "Use the repository although another user owns it, or may replace it.",
            show=lambda value: str(value).lower(),
        ),
        Key(
            "repository.reserve",
            size_or_share_value,
            "",
            "Free space on the repository's file system (`20GiB` or `5%`) that captures leave to others. Default: 5% or twice "
            "what others took of it during the last interval, whichever is more.",
            show=show_size_or_share,
        ),
        Key(
            "schedule.interval",
            interval_value,
            "1h",
            "Time between two snapshots (s, m, h, d, w).",
            "snapshot_interval",
            format_duration,
        ),
        Key(
            "retention.keep_within",
            duration_value,
            "7d",
            "Keep every snapshot younger than this.",
            "retention_policy",
            format_duration,
        ),
        Key("retention.keep_last", count_value, "3", "Keep this many of the newest."),
        Key(
            "retention.keep_hourly",
            count_value,
            "0",
            "Keep the newest of each of so many hours that have one.",
        ),
        Key("retention.keep_daily", count_value, "0", "The same for days."),
        Key("retention.keep_weekly", count_value, "0", "The same for weeks, from Monday."),
        Key("retention.keep_monthly", count_value, "0", "The same for months."),
        Key("retention.keep_yearly", count_value, "0", "The same for years."),
        Key(
            "retention.keep_tags",
            tags_value,
            "",
            "Keep every snapshot that has one of these tags.",
            show=show_list,
        ),
        Key(
            "retention.keep_emergency",
            count_value,
            "3",
            "Keep this many of the newest that were taken because a trainer died.",
        ),
        Key(
            "retention.keep_safety",
            duration_value,
            "7d",
            "Keep safety snapshots, which restores take first, for this long; the newest three, and those that can still undo a "
            "restore, in any case.",
            show=format_duration,
        ),
        Key(
            "retention.min_free",
            size_or_share_value,
            "",
            "Free space on the repository's file system (`50GiB` or `5%`) below which the oldest snapshots go "
            "although a rule keeps them; never the newest, held or tagged ones, except those that an ordinary user holds.",
            show=show_size_or_share,
        ),
        Key(
            "capture.io_priority",
            io_priority_value,
            "idle",
            "I/O class of the capture process: idle, best-effort:N (0 to 7), none.",
            "io_priority",
        ),
        Key(
            "capture.min_share",
            min_share_value,
            "1%",
            "How much of the time captures and upkeep work at least while others wait for the disk; it rises to all of it at "
            "`capture.finish_within`. 100%: they are never slowed down.",
            show=show_share,
        ),
        Key(
            "capture.finish_within",
            interval_value,
            "",
            "Time from a cut until its capture is slowed down by nothing any more. Default: a twelfth of `schedule.interval`, "
            "at most 5m.",
            show=format_duration,
        ),
        Key(
            "capture.undo_limit",
            undo_limit_value,
            "16GiB",
            "How large a root's undo log may grow before the snapshot in progress is given up.",
            show=format_size,
        ),
        Key(
            "overlay.tracked_names",
            names_value,
            "",
            "Names (shell patterns) of logs that programs create and keep open: each write is seen, so that a cut holds "
            "them, at half the speed of a file that passes the overlay. Default: `MANIFEST-*`, `*.log`, `*.jsonl` and more.",
            show=show_list,
        ),
        Key(
            "overlay.mapped_names",
            names_value,
            "",
            "Names of databases that programs write through mappings: they go through the kernel's cache, whoever opens them "
            "first. Default: `*.mdb`, `*.db`, `*.sqlite` and more.",
            show=show_list,
        ),
        Key(
            "control.socket",
            socket_value,
            "/run/ciuic/control.sock",
            "Control socket of the daemon. Default: `control.sock` in `daemon.runtime_dir`.",
        ),
        Key(
            "control.group",
            account_value("group"),
            "",
            "Group whose members may use the control socket besides root.",
            show=show_optional,
        ),
        Key(
            "watch.users",
            users_value,
            "",
            'Users whose trainers are watched besides those of root, of `control.group` and of owners of roots; `["*"]`: everybody\'s.',
            show=show_list,
        ),
        Key(
            "watch.emergency_per_hour",
            count_value,
            "3",
            "So many emergency snapshots an hour for one trainer at most, and four times as many in all; 0: none.",
        ),
        Key(
            "holds.max_of_a_user",
            count_value,
            "16",
            "How many held snapshots of its roots a user may have at once that is neither root nor in `control.group`; "
            "0: none. Further ones are taken and not held.",
        ),
        Key(
            "holds.max_of_a_user_per_hour",
            count_value,
            "8",
            "How many of them such a user may ask for within an hour.",
        ),
        Key(
            "alert.command",
            program_value,
            "",
            "Program that is run with each alert, and its arguments: no shell, JSON on its standard input.",
            show=show_list,
        ),
        Key(
            "alert.user",
            account_value("user"),
            "",
            "The user that it is run as; root where there is none.",
            show=show_optional,
        ),
        Key("alert.timeout", interval_value, "30s", "After this it is killed.", show=format_duration),
        Key(
            "daemon.runtime_dir", path_value, "/run/ciuic", "Where the daemon keeps its sockets and its lock."
        ),
        Key(
            "log.level",
            one_of_value(("debug", "info", "warning", "error")),
            "info",
            "debug, info, warning or error.",
        ),
        Key(
            "log.format",
            one_of_value(("auto", "json", "text")),
            "auto",
            "json, text, or auto: text on a terminal, json elsewhere.",
        ),
    )
}

ROOT_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("path", path_value, "", "The directory to protect; absolute."),
        Key("driver", one_of_value(DRIVERS), "auto", "auto, kernel or pyfuse3."),
        Key(
            "exclude",
            patterns_value,
            "",
            "As the global `exclude`, for this root alone; a leading `/` is the top of the root.",
            show=show_list,
        ),
    )
}

TRAINER_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("name", trainer_name_value, "", "What it is called in status, alerts and messages of snapshots."),
        Key(
            "pid_file", path_value, "", "File with the number of its process; one that ends well removes it."
        ),
        Key("heartbeat_file", path_value, "", "File that it writes to or touches while it lives."),
        Key("heartbeat", interval_value, "", "How old that file may become.", show=format_duration),
    )
}

FLAT_ROOTS_NAME = "protected_directories"
FLAT_NAMES: dict[str, str] = {key.flat_name: key.name for key in KEYS.values() if key.flat_name}
"""Name in the flat format → dotted name."""
