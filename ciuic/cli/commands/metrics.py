"""``ciuic metrics`` and ``ciuic exporter``: the daemon's metrics, once as text or a file, or served to Prometheus in the foreground."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

import click

from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import note, out
from ciuic.cli.shared.session import current
from ciuic.config.values import listen_value
from ciuic.errors import CiuicError, NotFound, UsageError


@click.command("metrics", cls=FrameCommand)
@click.option(
    "--textfile",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Replace FILE with the metrics, for node_exporter's textfile collector.",
)
def metrics_command(textfile: Path | None) -> None:
    """Print the daemon's metrics in Prometheus text format."""
    text = current().control.metrics()
    if textfile is None:
        out(text.rstrip("\n"))
        return
    try:
        # In the same directory, so that a collector sees the old file or the new one, and with a suffix that it does not read.
        fd, temporary = tempfile.mkstemp(prefix=f".{textfile.name}.", suffix=".new", dir=textfile.parent)
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), 0o644)
        os.replace(temporary, textfile)
    except OSError as error:
        raise CiuicError(f"cannot write {textfile}: {error.strerror}") from error


@click.command("exporter", cls=FrameCommand)
@click.option("--listen", metavar="HOST:PORT", help="Address instead of `exporter.listen`.")
def exporter_command(listen: str | None) -> None:
    """Show the daemon's metrics to Prometheus, in the foreground, until SIGTERM.

    Exit code 3 means that no address is configured. The daemon writes its metrics only while `exporter.listen` is configured.
    """
    from ciuic.exporter.server import ExporterServer
    from ciuic.protocol.metrics_file import METRICS_NAME

    config = current().config
    try:
        place = listen_value(listen) if listen is not None else config.exporter.listen
    except ValueError as error:
        raise UsageError(f"--listen {error}") from error
    if place is None:
        raise NotFound(
            "no address for the metrics is configured",
            hint='listen = "127.0.0.1:9847" in the table [exporter]',
        )
    server = ExporterServer(place, config.runtime_dir / METRICS_NAME)

    def stop(*_: object) -> None:
        # In a thread, because shutdown() waits for the loop that this handler interrupts.
        threading.Thread(target=server.shutdown, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    note(f"metrics at http://{place}/metrics")
    with server:
        server.serve_forever()
