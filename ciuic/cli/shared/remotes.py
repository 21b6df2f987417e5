"""The remote that ``--repo URL`` names, opened for reading.

Guarantees: a machine that never saw the remote needs the URL and the key, and no configuration. Secrets come from the environment, the
configuration or a prompt on the terminal, and never from the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from ciuic.cli.shared import slow
from ciuic.cli.shared.messages import complain
from ciuic.errors import CiuicError, NotFound, UsageError, pip_install

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.remote.objects.model import Objects
    from ciuic.remote.objects.urls import StoreSettings
    from ciuic.remote.reading.opening import ReadableRemote
    from ciuic.remote.sealing.key_slots import SlotSecret


# People type keys from paper.
_TRIES: Final = 3
_STORE_HINT: Final = (
    "check the URL and the network; the server of an S3-compatible store is AWS_ENDPOINT_URL, or endpoint under [remote]; "
    "credentials are where the store's own tools have them"
)
_HINTS: Final = {
    "file": "is its file system mounted, and the path right?",
    "ssh": "try the same connection by hand: ssh USER@HOST true; ssh_command under [remote], or CIUIC_SSH_COMMAND, names another ssh, "
    "ssh_program or CIUIC_SSH_PROGRAM another ciuic there",
}
_INSTALL_HINT: Final = pip_install()


class EveryVersion(NamedTuple):
    """Wish to read all versions of a remote's objects."""

    before_ns: int | None
    """Leave out what was stored at this time or later (ns since 1970); None for nothing."""


def waiting_aloud(verbosity: int) -> Callable[[str], AbstractContextManager[None]]:
    """Return what a command enters while it looks at the remote of a name: it says so where that takes long, unless -q is given."""
    # The session is known to the command's own thread alone.
    say = complain if verbosity >= 0 else lambda text: None
    return lambda name: slow.if_slow(
        lambda: say(f"still asking the remote {name} what it has"), slow.ANSWER_SECONDS
    )


def open_named_remote(
    url: str,
    remotes: Callable[[], Sequence[RemoteConfig]],
    every_version: EveryVersion | None = None,
    *,
    all_claims: bool = False,
    may_ask: bool = True,
) -> ReadableRemote:
    """Open the remote with this URL.

    Args:
        url: Place of the remote.
        remotes: Returns what the configuration says of remotes; may raise CiuicError.
        every_version: Read it behind deletions; None to read what is there.
        all_claims: Return what logs gave up as well; behind deletions that is asked for by a time.
        may_ask: Ask for a key on a terminal if there is none.

    Raises:
        UsageError: the URL is none of a remote, or the packages for remotes are not installed.
        CiuicError: as `open_remote_repository`.
    """
    try:
        # Only here: the other commands do without these packages.
        from ciuic.remote.access import configured_secrets
        from ciuic.remote.errors import WrongKey
        from ciuic.remote.objects.model import NoSuchBucket, RemoteRefused, RemoteUnreachable
        from ciuic.remote.reading.opening import open_behind_deletions, open_remote_repository
        from ciuic.system.privileges import no_core_files
    except ImportError as error:
        raise UsageError(
            f"remotes need a package that is not installed: {error}", hint=_INSTALL_HINT
        ) from None
    no_core_files()
    config = configured_remote(url, remotes)
    settings = settings_of(config)
    secrets = configured_secrets(config)
    # An attacker who can write to the bucket could otherwise have a host without a key read forged snapshots.
    sealed = config is not None and config.encryption

    def opened(secrets: Sequence[SlotSecret]) -> ReadableRemote:
        if every_version is None:
            return open_remote_repository(
                url,
                settings,
                secrets,
                require_sealed=sealed,
                goes_on=goes_on if may_ask else None,
                all_claims=all_claims,
            )
        before_ns = every_version.before_ns
        return open_behind_deletions(url, settings, secrets, before_ns=before_ns, require_sealed=sealed)

    try:
        return opened(secrets)
    except (RemoteUnreachable, RemoteRefused, NoSuchBucket) as error:
        raise _named(error, url) from None
    except NotFound as error:
        # A reader has mistyped the URL: nothing is to be made there.
        error.hint = "check the URL: its bucket and its prefix, as `ciuic remote status` on a host shows them"
        raise
    except WrongKey:
        if secrets or not may_ask or not sys.stdin.isatty():
            raise
    for left in reversed(range(_TRIES)):
        try:
            return opened([_asked(url)])
        except (WrongKey, UsageError) as error:
            if not left:
                raise
            complain("\n  ".join(filter(None, (f"{error.message}; once more", error.hint))))
    raise AssertionError("the last try returns or raises")


def goes_on(tried: int) -> bool:
    """Return whether a passphrase is tried with more key slots, as the user says; no where there is nobody to ask."""
    question = f"The passphrase opens none of {tried} key slots, and there are more. Try the next ones?"
    return sys.stdin.isatty() and click.confirm(question, err=True)


def _named(error: CiuicError, url: str) -> CiuicError:
    """Return the error with the URL in it, and with what to look at where it does not say."""
    from ciuic.remote.objects.model import UntrustedStore

    message = error.message if error.message.startswith(url) else f"{url}: {error.message}"
    if isinstance(error, UntrustedStore):
        # It says what to do, which the network has no part in.
        return error.anew(message)
    # Of a bucket that is not there only the name is known to be wrong.
    hint = error.hint if error.exit_code != NotFound.exit_code else ""
    kind = url.partition(":")[0]
    return error.anew(message, hint=hint or _HINTS.get(kind, _STORE_HINT))


def open_named_objects(url: str, remotes: Callable[[], Sequence[RemoteConfig]]) -> Objects:
    """Return the objects of the remote with this URL, to be written to.

    Args:
        url: Place of the remote.
        remotes: Returns what the configuration says of remotes; may raise CiuicError.
    """
    from ciuic.remote.objects.opening import open_objects

    return open_objects(url, settings_of(configured_remote(url, remotes)))


def settings_of(config: RemoteConfig | None) -> StoreSettings | None:
    """Return what the store of a remote must be told beside its URL; None where the configuration has no such remote."""
    from ciuic.remote.access import configured_settings

    return None if config is None else configured_settings(config)


def configured_remote(url: str, remotes: Callable[[], Sequence[RemoteConfig]]) -> RemoteConfig | None:
    """Return what the configuration says of this remote, if there is one that can be read."""
    from ciuic.remote.objects.urls import parse_url

    place = parse_url(url)
    try:
        known = remotes()
    except CiuicError:
        # A rescue must work where it is missing or broken.
        return None
    return next((remote for remote in known if parse_url(remote.url) == place), None)


def _asked(url: str) -> SlotSecret:
    """Ask for a passphrase, or a recovery key as it was printed."""
    from ciuic.remote.sealing.key_slots import typed_secret

    return typed_secret(click.prompt(f"passphrase or recovery key of {url}", hide_input=True, err=True))
