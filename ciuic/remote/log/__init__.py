"""Logs of a remote: which snapshots exist, and how one is committed while collectors delete packs.

Guarantees: a commit that returned is in the log; it was created by a party that knew every round whose fence stands
before it. No clock and no lock are involved. The room may import format, sealing, objects and what lies below them.

References:
    docs/remote-format.md, sections 6 and 8
"""
