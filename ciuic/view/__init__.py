"""Snapshots as a read-only file system: a tree of nodes (`tree`), the requests of the kernel (`filesystem`), and its mount (`mount`)."""
