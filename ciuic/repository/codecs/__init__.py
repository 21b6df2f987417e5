"""Codecs: how the content of a chunk becomes stored bytes, by compression, byte planes or a difference.

The package may import the formats and the disk.
"""
