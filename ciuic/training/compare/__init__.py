"""Difference of two saved states, tensor by tensor, from the blocks in which they differ.

Imports the format of snapshots and NumPy, which is imported when it is used; no framework and no writer.
"""
