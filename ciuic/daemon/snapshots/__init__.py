"""Snapshots on their way from a request to the commit: cut, queue, capture, commit, promise.

The package may import `base`, `roots` and `capture`.
"""
