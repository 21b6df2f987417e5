"""Collection of a remote: delete packs that no snapshot needs, beside uploaders that never stop.

Guarantee: a snapshot that some log commits and no log removes keeps a copy of each of its chunks, whatever uploaders and
other collectors do, wherever any of them stops or pauses. The room may import index, log and what lies below them; it
reads snapshots only through a function that its caller brings.

References:
    docs/remote-format.md, section 8
"""
