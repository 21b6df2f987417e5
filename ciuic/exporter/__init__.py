"""The exporter: metrics of the daemon over HTTP, for Prometheus.

A process of its own, because the daemon has no network and every connection to it could occupy it. It reads one file of the
runtime directory (`ciuic.protocol.metrics_file`), needs no privilege, and answers nothing but ``/metrics`` and ``/``. Killing or
flooding it changes nothing for the daemon.
"""
