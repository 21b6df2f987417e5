"""Copies from devices into memory shared with the writer: arenas, streams, copies beside the computation.

The package may import `util` and `format`.
"""
