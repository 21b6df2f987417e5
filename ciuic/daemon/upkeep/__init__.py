"""Retention, prune and scrub as the daemon runs them.

The package may import `base` and `snapshots`.
"""
