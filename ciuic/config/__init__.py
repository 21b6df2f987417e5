"""Configuration: two file formats with one meaning; every mistake is reported with file and line.

    config = load_config(file, repository=…)      # effective, complete and valid as text
    raise_for(check_places(config))               # do the directories exist and fit together?
    repository = repository_path(config)
    add_roots(writable_file(file), [RootConfig(path)], repository_path=repository)
    for key, value, origin in shown(config): …    # config show

The keys follow from the structs of `ciuic.config.model` (``KEYS``; ``REMOTE_KEYS`` of one ``[remote]``);
docs/configuration.md explains them.
Nothing here mounts, captures or opens a repository. The package may import ciuic.system, ciuic.protocol and
the modules at the top of ciuic. `edit`, `owners` and `places` are imported on first use: most commands read the
configuration and need nothing else of it.
"""

from typing import TYPE_CHECKING

from ciuic.config.keys import FLAT_NAMES, FLAT_ROOTS_NAME, KEYS, REMOTE_KEYS, shown
from ciuic.config.load import (
    check_text,
    convert_flat,
    find_file,
    load_config,
    parse_config,
    raise_for,
    read_text,
)
from ciuic.config.model import (
    AlertConfig,
    Config,
    ControlConfig,
    DrillConfig,
    ExporterConfig,
    HoldsConfig,
    OverlayConfig,
    PreemptionConfig,
    Problem,
    RemoteConfig,
    RemotePrice,
    RemoteSchedule,
    RepositoryConfig,
    RootConfig,
    SnapshotWhen,
    TierRule,
    TrainerConfig,
    WatchConfig,
    WatchNumber,
    WebConfig,
)
from ciuic.config.values import DailyWindow, IoPrioritySetting
from ciuic.deferred_imports import lazy_attributes
from ciuic.retention import MinFree

if TYPE_CHECKING:
    from ciuic.config.edit import add_roots, remove_roots, writable_file, write_remote
    from ciuic.config.owners import alert_flaw, check_file, check_owners
    from ciuic.config.places import (
        NoDirectory,
        canonical_root,
        check_overlaps,
        check_places,
        check_repository,
        check_root,
        check_roots,
        default_repository_path,
        is_ciuic_mount,
        repository_path,
    )

__all__ = [
    "FLAT_NAMES",
    "FLAT_ROOTS_NAME",
    "KEYS",
    "REMOTE_KEYS",
    "AlertConfig",
    "Config",
    "ControlConfig",
    "DailyWindow",
    "DrillConfig",
    "ExporterConfig",
    "HoldsConfig",
    "IoPrioritySetting",
    "MinFree",
    "NoDirectory",
    "OverlayConfig",
    "PreemptionConfig",
    "Problem",
    "RemoteConfig",
    "RemotePrice",
    "RemoteSchedule",
    "RepositoryConfig",
    "RootConfig",
    "SnapshotWhen",
    "TierRule",
    "TrainerConfig",
    "WatchConfig",
    "WatchNumber",
    "WebConfig",
    "add_roots",
    "alert_flaw",
    "canonical_root",
    "check_file",
    "check_overlaps",
    "check_owners",
    "check_places",
    "check_repository",
    "check_root",
    "check_roots",
    "check_text",
    "convert_flat",
    "default_repository_path",
    "find_file",
    "is_ciuic_mount",
    "load_config",
    "parse_config",
    "raise_for",
    "read_text",
    "remove_roots",
    "repository_path",
    "shown",
    "writable_file",
    "write_remote",
]

_HOMES = {
    "edit": "add_roots remove_roots writable_file write_remote",
    "owners": "alert_flaw check_file check_owners",
    "places": "NoDirectory canonical_root check_overlaps check_places check_repository check_root check_roots default_repository_path"
    " is_ciuic_mount repository_path",
    # For its old name.
    "values": "IoPrioritySetting",
}


__getattr__ = lazy_attributes(__name__, _HOMES, renamed={"IoPriority": "IoPrioritySetting"})
