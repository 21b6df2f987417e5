"""Capture process: it reads a sealed epoch and writes a snapshot, while the job runs on.

It runs without privileges that it does not need. The package may import `base` and the repository.
"""
