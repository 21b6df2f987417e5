"""``ciuic remote test``: writes to a bucket, reads, races, and measures.

Guarantees: what it made is deleted again, where the credentials allow it; snapshots are not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, note, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import NotFound
from ciuic.units import human_size, plural

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.remote.objects.prove import Measurement

_MIB = 1 << 20


@click.command("test", cls=FrameCommand)
@targets.place_options
@click.option(
    "--size",
    type=click.IntRange(1, 1024),
    default=128,
    show_default=True,
    metavar="MIB",
    help="MiB to write and read for the rates.",
)
@json_option
def measure(place: str, name: str, endpoint: str, region: str, size: int, as_json: bool) -> None:
    """Test whether a bucket serves as a remote, and how fast it is.

    Many writers create one name at once, which must have one winner that stays. Then large and small objects are
    written, read, listed and deleted. Requests and traffic cost what the store charges for them.
    """
    from ciuic.remote.access import configured_objects
    from ciuic.remote.objects import prove

    config = targets.find_remote(current().config, place, name=name, endpoint=endpoint, region=region)
    count = min(8, size)
    found = prove.measure(
        lambda: configured_objects(config),
        object_bytes=size * _MIB // count,
        objects=count,
        sleep=targets.proof_sleep(config),
    )
    key = _key(config)
    if as_json:
        document = {
            "remote": config.name,
            "url": config.url,
            "create_only": True,
            "opens": key,
            **found._asdict(),
        }
        out_json({**document, "proof": found.proof._asdict()})
        return
    _print(found, key)


def _key(config: RemoteConfig) -> str:
    """Return in a word what the configured keys open; raise if they do not open the remote."""
    from ciuic.remote.access import configured_objects

    objects = configured_objects(config)
    try:
        remote = targets.opened(config, objects)
    except NotFound:
        return "no remote"
    finally:
        objects.close()
    return "encrypted" if remote.stored.sealed else "in clear"


def _print(found: Measurement, key: str) -> None:
    from ciuic.cli.shared.output import Column, show_table

    proof = found.proof
    rows = [
        ("create-only", f"{proof.races} races of {proof.racers} writers, one winner each"),
        ("write", f"{human_size(found.put_bytes_per_second)}/s"),
        ("read", f"{human_size(found.get_bytes_per_second)}/s"),
        ("create of 200 bytes", _milliseconds(found.small_put_seconds)),
        ("read of 200 bytes", _milliseconds(found.small_get_seconds)),
        ("read of 256 KiB within an object", _milliseconds(found.range_seconds)),
        ("list", _milliseconds(found.list_seconds)),
        ("remote", {"no remote": "none here yet"}.get(key, f"opened, {key}")),
    ]
    show_table([Column("TEST"), Column("RESULT", shrink=True)], rows)
    if proof.left:
        note(
            f"these credentials may not delete: {plural(len(proof.left), 'object below proof/ stays', 'objects below proof/ stay')}"
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
