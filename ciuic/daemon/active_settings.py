"""The settings in force, and the repository that they name.

Guarantees: a configuration that is not valid, or that cannot be taken up while the daemon runs, changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ciuic.config import Config, Problem, check_overlaps, check_repository, raise_for
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.settings import Settings, settings_of
from ciuic.errors import CiuicError
from ciuic.system import mountinfo, service_manager


class ActiveSettings:
    """Holder of the current `Settings` and `Store`, which a reload replaces.

    Belongs to the trio thread, except for `read`.
    """

    def __init__(self, config: Config, load: Callable[[], Config]) -> None:
        """Take up the configuration that the daemon starts with.

        Args:
            config: configuration to start with.
            load: reads the configuration again.

        Raises:
            ConfigError: `config` is not valid.
        """
        # Mounts are read in `read` alone: a bind mount that is made later must not keep a daemon from
        # starting.
        raise_for([*check_overlaps(config.roots), *_check_repository(config)])
        self._load = load
        self.settings = settings_of(config)
        self.store = _open_store(self.settings)

    def read(self) -> Settings:
        """Return the configuration as it is on disk now. Blocks; raises ConfigError when it is not valid."""
        config = self._load()
        # Overlaps through bind mounts are refused here, where a refusal leaves everything as it was, and not
        # at the start: a mount that somebody makes must not end the protection of a root.
        raise_for([*check_overlaps(config.roots, mountinfo.read()), *_check_repository(config)])
        return settings_of(config)

    def replace(self, settings: Settings) -> None:
        """Put new settings in force, except for the socket and the runtime directory, which need a restart.

        Raises:
            CiuicError: the repository would change.
        """
        current = self.settings
        if current.repository is not None and settings.repository != current.repository:
            raise CiuicError(
                f"the repository cannot change from {current.repository} to {settings.repository} while running",
                hint=service_manager.restart_hint(),
            )
        # Kept where nothing changed: a Store remembers that its repository was there, so that none is created
        # where one has gone.
        if (self.store.path, self.store.trusted) != (settings.repository, settings.trust_repository):
            self.store = _open_store(settings)
        # Workers and commands find the daemon by these two.
        self.settings = settings._replace(socket=current.socket, runtime_dir=current.runtime_dir)

    def remove_root(self, path: str) -> None:
        """Forget a root that is not served any more, until the configuration is read again."""
        roots = tuple(root for root in self.settings.roots if root.path != path)
        self.settings = self.settings._replace(roots=roots)


def _open_store(settings: Settings) -> Store:
    return Store(settings.repository, block_bytes=settings.block_bytes, trusted=settings.trust_repository)


def _check_repository(config: Config) -> list[Problem]:
    """Return what is wrong with the repository's place; a daemon without roots needs no repository."""
    if not config.roots and config.repository.path is None:
        return []
    return check_repository(config, mountinfo.read())
