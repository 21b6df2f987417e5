"""``ciuic metrics`` and ``ciuic exporter``: the daemon's metrics, and traces of snapshots.

The metrics are printed once, as text or to a file, or served to Prometheus in the foreground; traces are sent meanwhile.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import click

from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import note, out
from ciuic.cli.shared.session import current
from ciuic.config.values import endpoint_value, listen_value
from ciuic.errors import CiuicError, NotFound, UsageError
from ciuic.system.disk import Disk


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
    replace_textfile(textfile, text)


def replace_textfile(textfile: Path, text: str) -> None:
    """Replace a file of node_exporter's textfile collector.

    Raises:
        CiuicError: it cannot be written.
    """
    try:
        # The collector passes over the temporary name.
        Disk().replace_file(textfile, text.encode(), mode=0o644, durable=False, shared=True)
    except OSError as error:
        raise CiuicError(f"cannot write {textfile}: {error.strerror}") from error


@click.command("exporter", cls=FrameCommand)
@click.option("--listen", metavar="HOST:PORT", help="Address instead of `exporter.listen`.")
@click.option(
    "--otlp", metavar="URL", help="Send a trace of each snapshot there, instead of to `exporter.otlp`."
)
@click.option(
    "--otlp-headers",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Headers of these requests, one NAME: VALUE a line, instead of `exporter.otlp_headers`.",
)
def exporter_command(listen: str | None, otlp: str | None, otlp_headers: Path | None) -> None:
    """Show the daemon's metrics to Prometheus and send traces, in the foreground, until SIGTERM.

    Exit code 3 means that neither an address nor a receiver of traces is configured, or that the SDK for traces is not installed. The
    daemon writes its metrics only while `exporter.listen` is configured, and spans only while `exporter.otlp` is.
    """
    from ciuic.exporter.server import ExporterServer
    from ciuic.exporter.traces import SpanSender, open_sender, read_headers, state_dir
    from ciuic.protocol.metrics_file import METRICS_NAME
    from ciuic.protocol.span_spool import SPANS_NAME

    config = current().config
    place = _parsed("--listen", listen_value, listen, config.exporter.listen)
    url = _parsed("--otlp", endpoint_value, otlp, config.exporter.otlp)
    if place is None and url is None:
        raise NotFound(
            "no address for the metrics and no receiver of traces is configured",
            hint='listen = "127.0.0.1:9847" in the table [exporter]',
        )
    stopped = threading.Event()
    sender = thread = server = None
    ends: list[Callable[[], None]] = [stopped.set]
    if url is not None:
        send, end = open_sender(url, read_headers(otlp_headers or config.exporter.otlp_headers))
        sender = SpanSender(config.runtime_dir / SPANS_NAME, state_dir(), send)
        thread = threading.Thread(target=sender.run, name="traces", daemon=True)
        ends += [sender.stop, end]
    if place is not None:
        more = (lambda: "") if sender is None else sender.metrics_text
        server = ExporterServer(place, config.runtime_dir / METRICS_NAME, more)
        ends.append(server.shutdown)

    def stop(*_: object) -> None:
        # In threads, because shutdown() waits for the loop that this handler interrupts.
        for end in ends:
            threading.Thread(target=end, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if thread is not None:
        note(f"traces to {url}")
        thread.start()
    if server is not None:
        note(f"metrics at http://{place}/metrics")
        with server:
            server.serve_forever()
    else:
        stopped.wait()


def _parsed(
    option: str, parse: Callable[[object], str | None], given: str | None, configured: str | None
) -> str | None:
    """Return the value of an option, or else of its key."""
    try:
        return configured if given is None else parse(given)
    except ValueError as error:
        raise UsageError(f"{option} {error}") from error
