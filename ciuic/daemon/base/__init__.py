"""Parts that every other part of the daemon uses.

These are settings, alerts, events, the repository and the runtime directory.

The package imports nothing else of the daemon.
"""
