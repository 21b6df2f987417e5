"""The remote that an operator means, and the keys that open it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from ciuic.cli.shared.session import Session
from ciuic.errors import NotFound, UsageError

if TYPE_CHECKING:
    from ciuic.config import Config, RemoteConfig
    from ciuic.remote.access import Remote
    from ciuic.remote.objects.model import Objects
    from ciuic.remote.sealing.key_slots import SlotSecret


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument URL and the options that say what a URL does not."""
    for add in (
        click.option("--region", default="", metavar="REGION", help="Region of the bucket."),
        click.option(
            "--endpoint",
            default="",
            metavar="URL",
            help="Server that speaks the protocol of the URL, such as MinIO.",
        ),
        click.option(
            "--name",
            default="",
            metavar="NAME",
            help="Name of the remote in the configuration; default: remote.",
        ),
        click.argument("place", metavar="[URL]", default=""),
    ):
        command = add(command)
    return command


place_argument: Final = click.argument("place", metavar="[REMOTE]", default="")
"""Adds the argument REMOTE: a name of the configuration, or a URL."""


def find_remotes(config: Config, place: str) -> list[RemoteConfig]:
    """Return the remote that is meant, as `find_remote`, or all that are configured where none is."""
    if place or _repo_url() or not config.remotes:
        # The same words and exit code for no remote as for a wrong name.
        return [find_remote(config, place)]
    return list(config.remotes)


def find_remote(
    config: Config,
    place: str,
    *,
    name: str = "",
    endpoint: str = "",
    region: str = "",
    is_new: bool = False,
) -> RemoteConfig:
    """Return the remote that is meant.

    Args:
        config: Configuration.
        place: URL, or name of a configured remote; empty for that of --repo or CIUIC_REPO, else the only one that is configured.
        name: Name of the remote.
        endpoint: Server of the URL.
        region: Region of the URL.
        is_new: It may get a table of its own in the configuration, and needs a name if there are others.

    Raises:
        NotFound: it is not configured.
        UsageError: the URL or an option is wrong, contradicts the configuration, or a name is missing.
    """
    place = place or ("" if name else _repo_url())
    if "://" in place:
        return _of_url(config, place, name, endpoint, region, is_new=is_new)
    name = place or name
    known = {remote.name: remote for remote in config.remotes}
    if not known:
        raise NotFound(
            "no remote is configured", hint="ciuic remote init URL makes one, ciuic remote join URL uses one"
        )
    if not name and len(known) > 1:
        raise UsageError(f"several remotes are configured: {', '.join(known)}", hint="name one of them")
    if name and name not in known:
        raise NotFound(f"no remote {name!r} is configured", hint=f"there is: {', '.join(known)}")
    if endpoint or region:
        raise UsageError(
            "--endpoint and --region go with a URL; those of a configured remote are in its table"
        )
    return known[name] if name else next(iter(known.values()))


def _session() -> Session | None:
    context = click.get_current_context(silent=True)
    return None if context is None else context.find_object(Session)


def _repo_url() -> str:
    """Return the URL of --repo or CIUIC_REPO; empty where it is none of a remote."""
    session = _session()
    return "" if session is None else session.remote_url or ""


def _of_url(
    config: Config, place: str, name: str, endpoint: str, region: str, *, is_new: bool
) -> RemoteConfig:
    from ciuic.config import REMOTE_KEYS, RemoteConfig

    given = {"url": place, "name": name, "endpoint": endpoint, "region": region}
    values: dict[str, Any] = {}
    for key, text in given.items():
        if text:
            try:
                values[key] = REMOTE_KEYS[key].parse(text)
            except ValueError as error:
                what = "the URL of a remote" if key == "url" else f"--{key.replace('_', '-')}"
                raise UsageError(f"{what} {error}") from None
    for remote in config.remotes:
        if remote.url != values["url"]:
            continue
        for key in ("name", "endpoint", "region"):
            if key in values and values[key] != getattr(remote, key):
                raise UsageError(
                    f"the configuration has {key} {getattr(remote, key)!r} for {remote.url}, not {values[key]!r}",
                    hint=f"leave --{key.replace('_', '-')} out, or change the configuration",
                )
        return remote
    if config.remotes and not name and is_new:
        raise UsageError(
            f"other remotes are configured ({', '.join(one.name for one in config.remotes)}): this one needs a name",
            hint="--name NAME",
        )
    if any(remote.name == name for remote in config.remotes):
        raise UsageError(
            f"the configuration has another remote with the name {name}", hint="choose another --name"
        )
    return RemoteConfig(**values)


def opened(config: RemoteConfig, objects: Objects) -> Remote:
    """Open a remote with the keys that are configured, or with one that is typed.

    Raises:
        NotFound: there is no remote.
        WrongKey: no key fits, or there is none and nobody to ask.
    """
    from ciuic.cli.shared.remotes import goes_on
    from ciuic.remote.access import configured_secrets, open_configured

    session = _session()
    if session is not None:
        session.take_events()
    secrets = configured_secrets(config)
    if not secrets and config.encryption and sys.stdin.isatty():
        secrets = [typed_secret()]
    return open_configured(config, objects, secrets, goes_on=goes_on)


def typed_secret() -> SlotSecret:
    """Ask for a passphrase or recovery key. The prompt goes to stderr, and what is typed is not shown."""
    from ciuic.remote.sealing import key_slots

    text = click.prompt("Passphrase or recovery key of the remote", hide_input=True, err=True)
    return key_slots.typed_secret(text)


def new_passphrase() -> SlotSecret:
    """Return a passphrase for a new slot: from the environment, or typed twice.

    Raises:
        UsageError: there is none in the environment, and nobody to ask.
    """
    from ciuic.remote.access import PASSPHRASE_VARIABLE
    from ciuic.remote.sealing.key_slots import passphrase_secret

    text = os.environ.get(PASSPHRASE_VARIABLE, "")
    if not text:
        if not sys.stdin.isatty():
            raise UsageError("there is nobody to ask for a passphrase", hint=f"set {PASSPHRASE_VARIABLE}")
        text = click.prompt("New passphrase", hide_input=True, confirmation_prompt=True, err=True)
    return passphrase_secret(text)


def proof_sleep(config: RemoteConfig) -> Callable[[float], None]:
    """Return the pause between the steps of a proof: short for a directory, which has no replicas that lag behind."""
    import time

    if config.url.startswith(("file:", "ssh:")):
        return lambda seconds: time.sleep(seconds / 20)
    return time.sleep
