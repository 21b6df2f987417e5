"""Watched training processes: heartbeats, ends, emergency snapshots, pairs with training states.

The package may import `base` and `snapshots`.
"""
