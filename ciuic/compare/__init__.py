"""Differences between two trees, each of a snapshot or of a directory as it is now.

The package may import the repository, restore and `ciuic.system`, and nothing that prints.
"""
