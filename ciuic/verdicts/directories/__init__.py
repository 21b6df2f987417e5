"""Directories that are checkpoints, one module for each format: which files belong together, and what is missing.

A module reads the index or marker, and leaves the files to `ciuic.verdicts.verdict`.
"""
