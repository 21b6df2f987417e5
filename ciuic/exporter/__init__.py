"""The exporter: metrics of the daemon over HTTP, for Prometheus, and spans of snapshots to a tracing system.

A process of its own, because the daemon has no network and every connection to it could occupy it. It reads files of the
runtime directories (`ciuic.protocol.metrics_file`, `ciuic.protocol.span_spool`), needs no privilege, and answers nothing but
``/metrics`` and ``/``. Killing or flooding it changes nothing for the daemon.
"""
