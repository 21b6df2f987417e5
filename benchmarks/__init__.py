"""Benchmarks of a protected directory beside the plain one, on one machine (docs/benchmarks.md)."""
