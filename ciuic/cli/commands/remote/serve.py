"""``ciuic remote serve``: the far end of an ``ssh://`` remote.

Guarantees: nothing but the protocol is printed to stdout; no port is opened.
"""

from __future__ import annotations

import click

from ciuic.cli.shared.options import FrameCommand
from ciuic.errors import UsageError


@click.command(cls=FrameCommand)
@click.argument("directory", metavar="DIRECTORY")
@click.option("--stdio", is_flag=True, help="Talk over stdin and stdout; there is no other way.")
@click.option("--append-only", is_flag=True, help="Delete and replace nothing: for the key of a single host.")
@click.option(
    "--max-bytes", metavar="SIZE", help="Store nothing that makes the directory larger, such as 2TiB."
)
def serve(directory: str, stdio: bool, append_only: bool, max_bytes: str | None) -> None:
    """Serve a directory as a remote to ciuic on another machine.

    ssh starts it for ssh://HOST/DIRECTORY. As a forced command in authorized_keys (docs/remote.md) it decides
    what a key may do, whatever the other machine asks for.
    """
    import os

    from ciuic.remote.objects.pipe_server import serve as serve_objects
    from ciuic.units import parse_size

    if not stdio:
        raise UsageError("objects are served over stdin and stdout alone", hint="add --stdio")
    try:
        limit = None if max_bytes is None else parse_size(max_bytes)
    except ValueError as error:
        raise click.UsageError(f"--max-bytes: {error}") from error
    path = os.path.abspath(os.path.expanduser(directory))
    if path == "/":
        raise UsageError("a remote must have a directory of its own", hint="name one below /")
    # Whatever prints to stdout later must not get among the frames.
    write_fd = os.dup(1)
    os.dup2(2, 1)
    serve_objects(path, 0, write_fd, append_only=append_only, max_bytes=limit)
