"""Read model of a repository: versions of a path, names over all snapshots, what changed, and checkpoints with their verdicts.

Everything is found by comparing the ids of trees, and nothing that is equal is read, so that no index is needed. The package works
with every `Repository`, a remote one too; it may import the repository, compare and verdicts, and nothing that prints.
"""
