"""Bytes of packs, snapshot files and trees, as in docs/format.md: encoding, decoding, limits.

Pure functions without a disk; what cannot be decoded is refused in bounded memory. The package may import
configuration and errors.
"""
