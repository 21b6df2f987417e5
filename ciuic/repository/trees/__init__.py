"""Directories and block maps as chunks: read them, and write a changed one that shares the rest.

The package may import formats, and gets chunks through callables.
"""
