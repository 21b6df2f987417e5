"""Table of all configuration keys: names, how text becomes a value, where it goes, and how the value in effect is shown.

Both file formats, the suggestions for typing errors and the rows of ``config show`` follow from this table; `ciuic.config.model` has
the defaults, and docs/configuration.md explains each key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from ciuic.config.model import DEFAULT, DRIVERS, TIER_KINDS, Config, Origin
from ciuic.config.values import (
    account_value,
    bandwidth_value,
    block_size_value,
    change_value,
    clouds_value,
    count_value,
    duration_value,
    endpoint_value,
    flag_value,
    header_value,
    hosts_value,
    interval_value,
    io_priority_value,
    line_value,
    listen_value,
    metadata_endpoint_value,
    min_share_value,
    name_value,
    names_value,
    notify_value,
    one_of_value,
    path_pattern_value,
    path_value,
    patterns_value,
    ping_value,
    positive_value,
    price_value,
    program_value,
    remote_name_value,
    remote_url_value,
    show_flag,
    show_hidden,
    show_interval,
    show_list,
    show_optional,
    show_price,
    show_share,
    show_size_or_share,
    size_or_share_value,
    socket_value,
    tags_value,
    trainer_name_value,
    undo_limit_value,
    users_value,
    window_value,
    word_value,
)
from ciuic.units import format_duration, format_size

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Key(msgspec.Struct, frozen=True):
    """Configuration key: ``table.name`` in TOML, perhaps another name in the flat format."""

    name: str
    parse: Callable[[object], Any]
    flat_name: str = ""
    show: Callable[[Any], str] = str
    field: str = ""
    """Attribute that has the value, in the struct of the key's table, with dots; empty: called as the key."""

    def show_effective(self, config: object) -> str:
        """Return the value that a configuration has, as the operator would write it; an empty text for none."""
        value = attrgetter(self.field or self.name)(config)
        return "" if value is None else self.show(value)


KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("exclude", patterns_value, flat_name="exclude_patterns", show=show_list),
        # No default here: it follows the first root (`places.repository_path`).
        Key("repository.path", path_value, flat_name="snapshot_dir", show=show_optional),
        # Smaller blocks cost processor time for each, larger ones double the cost of a change in place
        # (docs/decisions/block-size.md).
        Key(
            "repository.block_size",
            block_size_value,
            show=format_size,
            field="repository.block_size_bytes",
        ),
        # Off: who owns a repository can read every file of every snapshot, and change what a restore brings
        # back.
        Key("repository.trust_owner", flag_value, show=show_flag),
        # Unset is not 0: the default follows what others wrote during the last interval
        # (`disk_space.reserve_of`). Without a reserve a first capture wrote until the job's disk was full.
        Key("repository.reserve", size_or_share_value, show=show_size_or_share),
        Key(
            "schedule.interval",
            interval_value,
            flat_name="snapshot_interval",
            show=format_duration,
            field="schedule.interval_seconds",
        ),
        Key(
            "retention.keep_within",
            duration_value,
            flat_name="retention_policy",
            show=format_duration,
            field="retention.keep_within_seconds",
        ),
        Key("retention.keep_last", count_value),
        Key("retention.keep_hourly", count_value),
        Key("retention.keep_daily", count_value),
        Key("retention.keep_weekly", count_value),
        Key("retention.keep_monthly", count_value),
        Key("retention.keep_yearly", count_value),
        Key("retention.keep_tags", tags_value, show=show_list),
        # A run that dies at night is found in the morning; by then its successor has written over what would
        # have said why.
        Key("retention.keep_emergency", count_value),
        # A rule of its own: counted as ordinary ones, four restores removed the snapshot that they came from
        # and the first undo.
        Key(
            "retention.keep_safety",
            duration_value,
            show=format_duration,
            field="retention.keep_safety_seconds",
        ),
        # Off: it is the one rule that removes what other rules keep.
        Key("retention.min_free", size_or_share_value, show=show_size_or_share, field="min_free"),
        # Acts under bfq and mq-deadline; under `none`, which NVMe disks use, the throttle does the work alone
        # (docs/decisions/weights.md).
        Key("capture.io_priority", io_priority_value, flat_name="io_priority"),
        # 1 %, and not 0: a process at the lowest priority alone would never run on a busy host
        # (docs/decisions/deadlines.md).
        Key("capture.min_share", min_share_value, show=show_share),
        # Unset follows `schedule.interval`, so that a snapshot is in progress for a twelfth of the time at
        # most.
        Key(
            "capture.finish_within",
            interval_value,
            show=format_duration,
            field="capture.finish_within_seconds",
        ),
        Key(
            "capture.undo_limit",
            undo_limit_value,
            show=format_size,
            field="capture.undo_limit_bytes",
        ),
        # Off: a drill writes as much as the newest checkpoint is large, which the disk may have no room for.
        Key("drill.every", interval_value, show=format_duration, field="drill.every_seconds"),
        Key("drill.scratch", path_value),
        # Off: nothing asks an address of the network that nobody named, and on other machines none answers.
        Key("preemption.clouds", clouds_value, show=show_list),
        # The shortest notice of all three.
        Key("preemption.grace", interval_value, show=format_duration, field="preemption.grace_seconds"),
        Key("preemption.endpoint", metadata_endpoint_value, show=show_optional),
        # A list in the file replaces all of the default.
        Key("overlay.tracked_names", names_value, show=show_list),
        Key("overlay.mapped_names", names_value, show=show_list),
        # Follows `daemon.runtime_dir` where that alone is set (`Draft.build`).
        Key("control.socket", socket_value),
        Key("control.group", account_value("group"), show=show_optional),
        Key("watch.users", users_value, show=show_list),
        # A trainer that dies again and again would take a snapshot each time.
        Key("watch.emergency_per_hour", count_value),
        Key("watch.silence", count_value),
        # Held snapshots stay whatever the rules say, so an ordinary user could fill the disk with them.
        Key("holds.max_of_a_user", count_value),
        Key("holds.max_of_a_user_per_hour", count_value),
        Key("alert.command", program_value, show=show_list),
        Key("alert.user", account_value("user"), show=show_optional),
        # Alerts run one at a time: a command that hangs would keep back those after it.
        Key("alert.timeout", interval_value, show=format_duration, field="alert.timeout_seconds"),
        # As far ahead as a weekend is long.
        Key("alert.full_within", duration_value, show=format_duration, field="alert.full_within_seconds"),
        Key("alert.notify", notify_value, show=show_hidden),
        Key("alert.ping", ping_value, show=show_hidden),
        # Off: metrics name the protected directories, and everybody who reaches the port can read them.
        Key("exporter.listen", listen_value, show=show_optional),
        Key("exporter.otlp", endpoint_value, show=show_optional),
        Key("exporter.otlp_headers", path_value, show=show_optional),
        # Off: nothing listens at an address unless it is asked to, and a page only shows.
        Key("web.listen", listen_value, show=show_optional),
        Key("web.hosts", hosts_value, show=show_list),
        Key("web.actions", flag_value, show=show_flag),
        Key("web.look_group", account_value("group"), show=show_optional),
        Key("web.restore_group", account_value("group"), show=show_optional),
        Key("web.decide_group", account_value("group"), show=show_optional),
        Key("web.proxy_user", account_value("user"), show=show_optional),
        Key("web.user_header", header_value),
        Key("daemon.runtime_dir", path_value, field="runtime_dir"),
        Key("log.level", one_of_value(("debug", "info", "warning", "error"))),
        Key("log.format", one_of_value(("auto", "json", "text"))),
    )
}

ROOT_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("path", path_value),
        Key("driver", one_of_value(DRIVERS)),
        Key("exclude", patterns_value, show=show_list),
        # Off: a root may have data alone, or a training that is done.
        Key("last_good_within", interval_value, show=format_duration, field="last_good_within_seconds"),
        Key("snapshots_dir", flag_value, show=show_flag),
    )
}

TRAINER_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("name", trainer_name_value),
        Key("pid_file", path_value),
        Key("heartbeat_file", path_value),
        Key("heartbeat", interval_value, show=format_duration, field="heartbeat_seconds"),
    )
}

WATCH_NUMBER_KEYS: dict[str, Key] = {
    key.name: key for key in (Key("file", path_value), Key("key", line_value))
}
"""Keys of one ``[[watch_number]]``."""

CHECKPOINT_KEYS: dict[str, Key] = {"path": Key("path", path_pattern_value)}
"""Keys of one ``[[checkpoints]]``."""

SNAPSHOT_WHEN_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("renamed", name_value, show=show_optional),
        Key("appears", name_value, show=show_optional),
        Key("closed", name_value, show=show_optional),
        Key("after", interval_value, show=format_duration, field="after_seconds"),
        Key("changes", change_value, show=format_size, field="changes_bytes"),
        # A program that renames every few seconds would take a snapshot each time.
        Key("least_between", duration_value, show=format_duration, field="least_between_seconds"),
        Key("per_hour", positive_value),
    )
}
"""Keys of one ``[[snapshot_when]]``."""

DEFAULT_REMOTE_NAME = "remote"
"""Name of the remote of a file that has one, unless it has a name."""
REMOTE_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        # No default among several: their names tell them apart in commands, alerts and directories.
        Key("name", remote_name_value),
        Key("url", remote_url_value),
        Key("endpoint", endpoint_value, show=show_optional),
        Key("region", word_value, show=show_optional),
        Key("ssh_command", line_value, show=show_optional),
        Key("ssh_program", line_value, show=show_optional),
        Key("bandwidth", bandwidth_value, show=format_size, field="bandwidth_bytes"),
        Key("max_lag", interval_value, show=format_duration, field="max_lag_seconds"),
        # A PUT every five minutes is 8,640 in a month: a few cents at most.
        Key("status_every", duration_value, show=format_duration, field="status_every_seconds"),
        Key("encryption", flag_value, show=show_flag),
        Key("key_file", path_value, show=show_optional),
        Key("key_command", program_value, show=show_list),
        Key("storage_class", word_value, show=show_optional),
        Key("keep.keep_within", duration_value, show=format_duration, field="keep.keep_within_seconds"),
        Key("keep.keep_last", count_value),
        Key("keep.keep_hourly", count_value),
        Key("keep.keep_daily", count_value),
        Key("keep.keep_weekly", count_value),
        Key("keep.keep_monthly", count_value),
        Key("keep.keep_yearly", count_value),
        Key("keep.keep_tags", tags_value, show=show_list),
        Key("keep.keep_emergency", count_value),
        Key("keep.keep_safety", duration_value, show=format_duration, field="keep.keep_safety_seconds"),
        Key("schedule.interval", interval_value, show=show_interval, field="schedule.interval_seconds"),
        Key("schedule.window", window_value),
        Key("price.put_per_1000", price_value, show=show_price),
        Key("price.get_per_1000", price_value, show=show_price),
        Key("price.gb_month", price_value, show=show_price),
    )
}
"""Keys of one ``[remote]``; a dot stands for a table in it, such as ``[remote.keep]``."""

TIER_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("after", duration_value, show=format_duration, field="after_seconds"),
        Key("storage_class", word_value, show=show_optional),
        Key("kind", one_of_value(TIER_KINDS)),
        # 1: the state from which a run would go on today is read at once, however long the run has slept.
        Key("keep_newest", count_value),
    )
}
"""Keys of one ``[[remote.tier]]``."""


def fields_of(keys: Mapping[str, Key], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values, by their keys, by the attributes that have them in the struct of the keys' table."""
    return {keys[name].field or name: value for name, value in values.items()}


def with_values(base: _Struct, keys: Mapping[str, Key], values: Mapping[str, Any]) -> _Struct:
    """Return a copy of a struct that has these values, by their keys, also in the structs within it."""
    own: dict[str, Any] = {}
    for path, value in fields_of(keys, values).items():
        section, dot, field = path.partition(".")
        if dot:
            own[section] = replace(own.get(section, getattr(base, section)), **{field: value})
        else:
            own[path] = value
    return replace(base, **own)


FLAT_ROOTS_NAME = "protected_directories"
FLAT_NAMES: dict[str, str] = {key.flat_name: key.name for key in KEYS.values() if key.flat_name}
"""Name in the flat format → dotted name."""


class ShownValue(NamedTuple):
    """Row of ``config show``; ``root[0].path`` and so on for the roots; no text for a value not set."""

    key: str
    value: str
    origin: Origin


def shown(config: Config) -> Iterator[ShownValue]:
    """Yield every key in the order of the documentation, then roots, trainers and remotes."""
    for name, key in KEYS.items():
        yield ShownValue(name, key.show_effective(config), config.origin(name))
    for index, root in enumerate(config.roots):
        yield ShownValue(f"root[{index}].path", os.fspath(root.path), root.origin)
        yield ShownValue(f"root[{index}].driver", root.driver, root.origin)
        yield ShownValue(f"root[{index}].exclude", ROOT_KEYS["exclude"].show(root.exclude), root.origin)
        if root.last_good_within_seconds:
            within = format_duration(root.last_good_within_seconds)
            yield ShownValue(f"root[{index}].last_good_within", within, root.origin)
        yield ShownValue(f"root[{index}].snapshots_dir", show_flag(root.snapshots_dir), root.origin)
    for index, trainer in enumerate(config.trainers):
        values: dict[str, object] = {"name": trainer.name, "pid_file": trainer.pid_file or ""}
        if trainer.heartbeat_file is not None:
            values["heartbeat_file"] = trainer.heartbeat_file
            values["heartbeat"] = TRAINER_KEYS["heartbeat"].show(trainer.heartbeat_seconds)
        for name, value in values.items():
            yield ShownValue(f"trainer[{index}].{name}", str(value), trainer.origin)
    for index, when in enumerate(config.snapshot_when):
        for name, key in SNAPSHOT_WHEN_KEYS.items():
            if getattr(when, key.field or name):
                yield ShownValue(f"snapshot_when[{index}].{name}", key.show_effective(when), when.origin)
    for index, number in enumerate(config.watch_numbers):
        yield ShownValue(f"watch_number[{index}].file", number.file, number.origin)
        yield ShownValue(f"watch_number[{index}].key", number.key, number.origin)
    for index, one in enumerate(config.checkpoints):
        yield ShownValue(f"checkpoints[{index}].path", one.path, one.origin)
    for index, remote in enumerate(config.remotes):
        for name, key in REMOTE_KEYS.items():
            text = key.show_effective(remote)
            yield ShownValue(f"remote[{index}].{name}", text, remote.origins.get(name, DEFAULT))
        for at, rule in enumerate(remote.tiers):
            for name, key in TIER_KEYS.items():
                text = key.show_effective(rule)
                yield ShownValue(f"remote[{index}].tier[{at}].{name}", text, remote.origin)
