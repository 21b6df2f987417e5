"""``ciuic exporter``: the process that shows the metrics to Prometheus, in the foreground."""

from __future__ import annotations

import signal
import threading

import click

from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import current
from ciuic.config.values import listen_value
from ciuic.errors import NotFound, UsageError


@click.command("exporter", cls=FrameCommand)
@click.option("--listen", metavar="HOST:PORT", help="Address instead of `exporter.listen`.")
def command(listen: str | None) -> None:
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
