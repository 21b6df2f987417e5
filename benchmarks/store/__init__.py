"""Benchmark of `make bench-store`: ciuic next to restic, borg and cp, with the commands of their users."""
