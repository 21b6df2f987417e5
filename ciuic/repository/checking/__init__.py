"""Checks of stored data: packs, segments, and what a snapshot refers to.

The package may import everything of the repository but writing and the public `Repository`.
"""
