"""Versions of a remote: read what was stored although it was deleted or overwritten since.

Guarantees: of several versions of a name, only one that verifies is used: by its seal in a sealed remote; in one in clear the
oldest that is well-formed, because names are written once. Memory and the number of versions that are tried are bounded
with any content of the bucket. The room may import access and what lies below it; it writes nothing.
"""
