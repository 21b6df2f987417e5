"""Dirty tracking of the current epoch, and the undo log that keeps sealed epochs readable.

The package may import `sealed_format`, `undo_format` and `system`.
"""
