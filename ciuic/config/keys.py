"""Table of all configuration keys: names, default, how text becomes a value, and how the value in effect is shown.

Both file formats, the suggestions for typing errors and the rows of ``config show`` follow from this table;
docs/configuration.md explains each key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from ciuic.config.model import DEFAULT, DRIVERS, TIER_KINDS, Config, Origin, RemoteConfig, TierRule
from ciuic.config.values import (
    account_value,
    bandwidth_value,
    block_size_value,
    count_value,
    duration_value,
    endpoint_value,
    flag_value,
    interval_value,
    io_priority_value,
    line_value,
    listen_value,
    min_share_value,
    names_value,
    one_of_value,
    path_value,
    patterns_value,
    price_value,
    program_value,
    remote_name_value,
    remote_url_value,
    show_flag,
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


class Key(msgspec.Struct, frozen=True):
    """Configuration key: ``table.name`` in TOML, perhaps another name in the flat format."""

    name: str
    parse: Callable[[object], Any]
    default: str
    """Default as the operator would write it; empty for none."""
    flat_name: str = ""
    show: Callable[[Any], str] = str


KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("exclude", patterns_value, "", flat_name="exclude_patterns", show=show_list),
        # No default here: it follows the first root (`places.repository_path`).
        Key("repository.path", path_value, "", flat_name="snapshot_dir", show=show_optional),
        # Smaller blocks cost processor time for each, larger ones double the cost of a change in place
        # (docs/decisions/block-size.md).
        Key("repository.block_size", block_size_value, "256KiB", show=format_size),
        # Off: who owns a repository can read every file of every snapshot, and change what a restore brings
        # back.
        Key("repository.trust_owner", flag_value, "false", show=show_flag),
        # Unset is not 0: the default follows what others wrote during the last interval
        # (`disk_space.reserve_of`). Without a reserve a first capture wrote until the job's disk was full.
        Key("repository.reserve", size_or_share_value, "", show=show_size_or_share),
        Key("schedule.interval", interval_value, "1h", flat_name="snapshot_interval", show=format_duration),
        Key(
            "retention.keep_within", duration_value, "7d", flat_name="retention_policy", show=format_duration
        ),
        Key("retention.keep_last", count_value, "3"),
        Key("retention.keep_hourly", count_value, "0"),
        Key("retention.keep_daily", count_value, "0"),
        Key("retention.keep_weekly", count_value, "0"),
        Key("retention.keep_monthly", count_value, "0"),
        Key("retention.keep_yearly", count_value, "0"),
        Key("retention.keep_tags", tags_value, "", show=show_list),
        # A run that dies at night is found in the morning; by then its successor has written over what would
        # have said why.
        Key("retention.keep_emergency", count_value, "3"),
        # A rule of its own: counted as ordinary ones, four restores removed the snapshot that they came from
        # and the first undo.
        Key("retention.keep_safety", duration_value, "7d", show=format_duration),
        # Off: it is the one rule that removes what other rules keep.
        Key("retention.min_free", size_or_share_value, "", show=show_size_or_share),
        # Acts under bfq and mq-deadline; under `none`, which NVMe disks use, the throttle does the work alone
        # (docs/decisions/weights.md).
        Key("capture.io_priority", io_priority_value, "idle", flat_name="io_priority"),
        # 1 %, and not 0: a process at the lowest priority alone would never run on a busy host
        # (docs/decisions/deadlines.md).
        Key("capture.min_share", min_share_value, "1%", show=show_share),
        # Unset follows `schedule.interval`, so that a snapshot is in progress for a twelfth of the time at
        # most.
        Key("capture.finish_within", interval_value, "", show=format_duration),
        Key("capture.undo_limit", undo_limit_value, "16GiB", show=format_size),
        # No text here: `_EMPTY` in load.py has the lists, and a list in the file replaces all of one.
        Key("overlay.tracked_names", names_value, "", show=show_list),
        Key("overlay.mapped_names", names_value, "", show=show_list),
        # Follows `daemon.runtime_dir` where that alone is set (`Draft.build`).
        Key("control.socket", socket_value, "/run/ciuic/control.sock"),
        Key("control.group", account_value("group"), "", show=show_optional),
        Key("watch.users", users_value, "", show=show_list),
        # A trainer that dies again and again would take a snapshot each time.
        Key("watch.emergency_per_hour", count_value, "3"),
        # Held snapshots stay whatever the rules say, so an ordinary user could fill the disk with them.
        Key("holds.max_of_a_user", count_value, "16"),
        Key("holds.max_of_a_user_per_hour", count_value, "8"),
        Key("alert.command", program_value, "", show=show_list),
        Key("alert.user", account_value("user"), "", show=show_optional),
        # Alerts run one at a time: a command that hangs would keep back those after it.
        Key("alert.timeout", interval_value, "30s", show=format_duration),
        # Off: metrics name the protected directories, and everybody who reaches the port can read them.
        Key("exporter.listen", listen_value, "", show=show_optional),
        Key("daemon.runtime_dir", path_value, "/run/ciuic"),
        Key("log.level", one_of_value(("debug", "info", "warning", "error")), "info"),
        Key("log.format", one_of_value(("auto", "json", "text")), "auto"),
    )
}

ROOT_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("path", path_value, ""),
        Key("driver", one_of_value(DRIVERS), "auto"),
        Key("exclude", patterns_value, "", show=show_list),
    )
}

TRAINER_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("name", trainer_name_value, ""),
        Key("pid_file", path_value, ""),
        Key("heartbeat_file", path_value, ""),
        Key("heartbeat", interval_value, "", show=format_duration),
    )
}

DEFAULT_REMOTE_NAME = "remote"
"""Name of the remote of a file that has one, unless it has a name."""
REMOTE_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        # No default among several: their names tell them apart in commands, alerts and directories.
        Key("name", remote_name_value, DEFAULT_REMOTE_NAME),
        Key("url", remote_url_value, ""),
        Key("endpoint", endpoint_value, "", show=show_optional),
        Key("region", word_value, "", show=show_optional),
        Key("ssh_command", line_value, "", show=show_optional),
        Key("ssh_program", line_value, "", show=show_optional),
        Key("bandwidth", bandwidth_value, "", show=format_size),
        Key("max_lag", interval_value, "", show=format_duration),
        Key("encryption", flag_value, "true", show=show_flag),
        Key("key_file", path_value, "", show=show_optional),
        Key("key_command", program_value, "", show=show_list),
        Key("storage_class", word_value, "", show=show_optional),
        # A remote answers the disasters that are found late: a month, which is also the time for which the
        # cheaper storage classes are paid at least. Its chunks are shared, so that it costs little.
        Key("keep.keep_within", duration_value, "30d", show=format_duration),
        Key("keep.keep_last", count_value, "10"),
        Key("keep.keep_hourly", count_value, "0"),
        Key("keep.keep_daily", count_value, "0"),
        Key("keep.keep_weekly", count_value, "0"),
        Key("keep.keep_monthly", count_value, "0"),
        Key("keep.keep_yearly", count_value, "0"),
        Key("keep.keep_tags", tags_value, "", show=show_list),
        Key("keep.keep_emergency", count_value, "10"),
        Key("keep.keep_safety", duration_value, "7d", show=format_duration),
        Key("schedule.interval", interval_value, "", show=format_duration),
        Key("schedule.window", window_value, ""),
        Key("price.put_per_1000", price_value, "", show=show_price),
        Key("price.get_per_1000", price_value, "", show=show_price),
        Key("price.gb_month", price_value, "", show=show_price),
    )
}
"""Keys of one ``[remote]``; a dot stands for a table in it, such as ``[remote.keep]``."""

TIER_KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("after", duration_value, "", show=format_duration),
        Key("storage_class", word_value, "", show=show_optional),
        Key("kind", one_of_value(TIER_KINDS), "all"),
        # 1: the state from which a run would go on today is read at once, however long the run has slept.
        Key("keep_newest", count_value, "1"),
    )
}
"""Keys of one ``[[remote.tier]]``."""

FLAT_ROOTS_NAME = "protected_directories"
FLAT_NAMES: dict[str, str] = {key.flat_name: key.name for key in KEYS.values() if key.flat_name}
"""Name in the flat format → dotted name."""


class ShownValue(NamedTuple):
    """Row of ``config show``; ``root[0].path`` and so on for the roots; no text for a value not set."""

    key: str
    value: str
    origin: Origin


_VALUE_OF: dict[str, Callable[[Config], Any]] = {
    "exclude": lambda config: config.exclude,
    "repository.path": lambda config: config.repository.path,
    "repository.block_size": lambda config: config.repository.block_size_bytes,
    "repository.trust_owner": lambda config: config.repository.trust_owner,
    "repository.reserve": lambda config: config.repository.reserve,
    "schedule.interval": lambda config: config.schedule.interval_seconds,
    "retention.keep_within": lambda config: config.retention.keep_within_seconds,
    "retention.keep_last": lambda config: config.retention.keep_last,
    "retention.keep_hourly": lambda config: config.retention.keep_hourly,
    "retention.keep_daily": lambda config: config.retention.keep_daily,
    "retention.keep_weekly": lambda config: config.retention.keep_weekly,
    "retention.keep_monthly": lambda config: config.retention.keep_monthly,
    "retention.keep_yearly": lambda config: config.retention.keep_yearly,
    "retention.keep_tags": lambda config: config.retention.keep_tags,
    "retention.keep_emergency": lambda config: config.retention.keep_emergency,
    "retention.keep_safety": lambda config: config.retention.keep_safety_seconds,
    "retention.min_free": lambda config: config.min_free,
    "capture.io_priority": lambda config: config.capture.io_priority,
    "capture.min_share": lambda config: config.capture.min_share,
    "capture.finish_within": lambda config: config.capture.finish_within_seconds,
    "capture.undo_limit": lambda config: config.capture.undo_limit_bytes,
    "overlay.tracked_names": lambda config: config.overlay.tracked_names,
    "overlay.mapped_names": lambda config: config.overlay.mapped_names,
    "control.socket": lambda config: config.control.socket,
    "control.group": lambda config: config.control.group,
    "watch.users": lambda config: config.watch.users,
    "watch.emergency_per_hour": lambda config: config.watch.emergency_per_hour,
    "holds.max_of_a_user": lambda config: config.holds.max_of_a_user,
    "holds.max_of_a_user_per_hour": lambda config: config.holds.max_of_a_user_per_hour,
    "exporter.listen": lambda config: config.exporter.listen,
    "alert.command": lambda config: config.alert.command,
    "alert.user": lambda config: config.alert.user,
    "alert.timeout": lambda config: config.alert.timeout_seconds,
    "daemon.runtime_dir": lambda config: config.runtime_dir,
    "log.level": lambda config: config.log.level,
    "log.format": lambda config: config.log.format,
}


_VALUE_OF_REMOTE: dict[str, Callable[[RemoteConfig], Any]] = {
    "name": lambda remote: remote.name,
    "url": lambda remote: remote.url,
    "endpoint": lambda remote: remote.endpoint,
    "region": lambda remote: remote.region,
    "ssh_command": lambda remote: remote.ssh_command,
    "ssh_program": lambda remote: remote.ssh_program,
    "bandwidth": lambda remote: remote.bandwidth_bytes,
    "max_lag": lambda remote: remote.max_lag_seconds,
    "encryption": lambda remote: remote.encryption,
    "key_file": lambda remote: remote.key_file,
    "key_command": lambda remote: remote.key_command,
    "storage_class": lambda remote: remote.storage_class,
    "keep.keep_within": lambda remote: remote.keep.keep_within_seconds,
    "keep.keep_last": lambda remote: remote.keep.keep_last,
    "keep.keep_hourly": lambda remote: remote.keep.keep_hourly,
    "keep.keep_daily": lambda remote: remote.keep.keep_daily,
    "keep.keep_weekly": lambda remote: remote.keep.keep_weekly,
    "keep.keep_monthly": lambda remote: remote.keep.keep_monthly,
    "keep.keep_yearly": lambda remote: remote.keep.keep_yearly,
    "keep.keep_tags": lambda remote: remote.keep.keep_tags,
    "keep.keep_emergency": lambda remote: remote.keep.keep_emergency,
    "keep.keep_safety": lambda remote: remote.keep.keep_safety_seconds,
    "schedule.interval": lambda remote: remote.schedule.interval_seconds or None,
    "schedule.window": lambda remote: remote.schedule.window,
    "price.put_per_1000": lambda remote: remote.price.put_per_1000,
    "price.get_per_1000": lambda remote: remote.price.get_per_1000,
    "price.gb_month": lambda remote: remote.price.gb_month,
}
_VALUE_OF_TIER: dict[str, Callable[[TierRule], object]] = {
    "after": lambda rule: rule.after_seconds,
    "storage_class": lambda rule: rule.storage_class,
    "kind": lambda rule: rule.kind,
    "keep_newest": lambda rule: rule.keep_newest,
}


def shown(config: Config) -> Iterator[ShownValue]:
    """Yield every key in the order of the documentation, then roots, trainers and remotes."""
    for name, key in KEYS.items():
        value = _VALUE_OF[name](config)
        yield ShownValue(name, "" if value is None else key.show(value), config.origin(name))
    for index, root in enumerate(config.roots):
        yield ShownValue(f"root[{index}].path", os.fspath(root.path), root.origin)
        yield ShownValue(f"root[{index}].driver", root.driver, root.origin)
        yield ShownValue(f"root[{index}].exclude", ROOT_KEYS["exclude"].show(root.exclude), root.origin)
    for index, trainer in enumerate(config.trainers):
        values: dict[str, object] = {"name": trainer.name, "pid_file": trainer.pid_file or ""}
        if trainer.heartbeat_file is not None:
            values["heartbeat_file"] = trainer.heartbeat_file
            values["heartbeat"] = TRAINER_KEYS["heartbeat"].show(trainer.heartbeat_seconds)
        for name, value in values.items():
            yield ShownValue(f"trainer[{index}].{name}", str(value), trainer.origin)
    for index, remote in enumerate(config.remotes):
        for name, key in REMOTE_KEYS.items():
            value = _VALUE_OF_REMOTE[name](remote)
            text = "" if value is None else key.show(value)
            yield ShownValue(f"remote[{index}].{name}", text, remote.origins.get(name, DEFAULT))
        for at, rule in enumerate(remote.tiers):
            for name, key in TIER_KEYS.items():
                text = key.show(_VALUE_OF_TIER[name](rule))
                yield ShownValue(f"remote[{index}].tier[{at}].{name}", text, remote.origin)
