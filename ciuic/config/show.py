"""Rows for ``config show``: each value of the effective configuration as text, and its origin."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ciuic.config.keys import KEYS, REMOTE_KEYS, ROOT_KEYS, TIER_KEYS, TRAINER_KEYS
from ciuic.config.model import DEFAULT, Config, Origin, RemoteConfig, TierRule


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
