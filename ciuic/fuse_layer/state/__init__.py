"""Nodes and open files of one overlay: tables, paths, settlement of changes that a predecessor had begun.

The package may import journal and tracking.
"""
