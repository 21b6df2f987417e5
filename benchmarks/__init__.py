"""Speed of a protected directory next to the plain one, side by side on one machine (docs/benchmarks.md)."""
