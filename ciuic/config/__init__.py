"""Configuration: two file formats, one meaning, and every mistake named by file and line.

    config = load_config(file, repository=…)      # what is in force, complete and valid as text
    raise_for(check_places(config))               # do the places exist, and lie well to each other?
    repository = repository_path(config)
    add_roots(writable_file(file), [RootConfig(path)], repository_path=repository)
    for key, value, origin in shown(config): …    # config show

The keys are the table ``KEYS`` (and ``ROOT_KEYS`` of one ``[[root]]``); docs/configuration.md explains them.
Nothing here mounts, captures or opens a repository. What only some commands need (edit, places, show) is imported when it is asked
for: most commands read the configuration, wait for it, and need nothing else of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ciuic.config.keys import FLAT_NAMES, FLAT_ROOTS_NAME, KEYS, ROOT_KEYS, TRAINER_KEYS, Key
from ciuic.config.load import (
    CONFIG_VARIABLE,
    FLAT_FILE,
    REPOSITORY_VARIABLE,
    TOML_FILE,
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
    CaptureConfig,
    Config,
    ControlConfig,
    Driver,
    HoldsConfig,
    IoPriority,
    LogConfig,
    Origin,
    OverlayConfig,
    Problem,
    RepositoryConfig,
    RootConfig,
    ScheduleConfig,
    TrainerConfig,
    WatchConfig,
)
from ciuic.retention import MinFree

if TYPE_CHECKING:
    from ciuic.config.edit import add_roots, remove_roots, writable_file
    from ciuic.config.owners import alert_flaw, check_file, check_owners
    from ciuic.config.places import (
        canonical_root,
        check_overlaps,
        check_places,
        check_repository,
        check_repository_beside,
        check_root,
        check_roots,
        default_repository_path,
        is_ciuic_mount,
        repository_path,
    )
    from ciuic.config.show import ShownValue, shown

__all__ = [
    "CONFIG_VARIABLE",
    "FLAT_FILE",
    "FLAT_NAMES",
    "FLAT_ROOTS_NAME",
    "KEYS",
    "REPOSITORY_VARIABLE",
    "ROOT_KEYS",
    "TOML_FILE",
    "TRAINER_KEYS",
    "AlertConfig",
    "CaptureConfig",
    "Config",
    "ControlConfig",
    "Driver",
    "HoldsConfig",
    "IoPriority",
    "Key",
    "LogConfig",
    "MinFree",
    "Origin",
    "OverlayConfig",
    "Problem",
    "RepositoryConfig",
    "RootConfig",
    "ScheduleConfig",
    "ShownValue",
    "TrainerConfig",
    "WatchConfig",
    "add_roots",
    "alert_flaw",
    "canonical_root",
    "check_file",
    "check_overlaps",
    "check_owners",
    "check_places",
    "check_repository",
    "check_repository_beside",
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
]

_LATE = {
    **dict.fromkeys(("add_roots", "remove_roots", "writable_file"), "edit"),
    **dict.fromkeys(
        (
            "canonical_root",
            "check_overlaps",
            "check_places",
            "check_repository",
            "check_repository_beside",
            "check_root",
            "check_roots",
            "default_repository_path",
            "is_ciuic_mount",
            "repository_path",
        ),
        "places",
    ),
    **dict.fromkeys(("ShownValue", "shown"), "show"),
    **dict.fromkeys(("alert_flaw", "check_file", "check_owners"), "owners"),
}


def __getattr__(name: str) -> object:
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
