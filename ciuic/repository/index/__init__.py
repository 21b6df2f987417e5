"""The database that finds chunks in packs and lists snapshots.

It is a cache, and can be rebuilt from packs and snapshot files at any time. The package may import packs,
formats and the disk.
"""
