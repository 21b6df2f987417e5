"""Identity of the remote for a new repository; apart, because it imports the libraries of object stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ciuic.errors import BY_EXIT_CODE, CiuicError
from ciuic.remote.access import configured_objects, configured_secrets, open_configured

if TYPE_CHECKING:
    from ciuic.config import Config
    from ciuic.repository.identity import Identity


def identity_of_remote(config: Config) -> tuple[Identity, int]:
    """Return identity and block size of the first remote of the configuration.

    Of several remotes one can share its chunks with the repository: the first.

    Raises:
        CiuicError: the remote cannot be opened; the hint says how to go on without it.
    """
    remote = config.remotes[0]
    try:
        objects = configured_objects(remote)
        try:
            opened = open_configured(remote, objects, configured_secrets(remote))
        finally:
            objects.close()
    except CiuicError as error:
        without = "--offline makes a repository that shares no chunks with other hosts"
        # The class of its exit code: its own may take other arguments.
        raise BY_EXIT_CODE[error.exit_code](
            f"the new repository gets its identity from the remote {remote.name}, which cannot be opened: {error.message}",
            hint="\n".join(filter(None, (error.hint, without))),
        ) from error
    return opened.identity, opened.stored.block_size
