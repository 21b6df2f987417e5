"""Seals of a remote: the master key, the slots that wrap it, and authenticated encryption of objects and packs.

Guarantees: what a sealer opens was sealed with the same master key, for the same remote and the same name;
secrets are never part of a repr, a message or a pickle. The package may import `ciuic.remote.errors` and `ciuic.system`.
"""
