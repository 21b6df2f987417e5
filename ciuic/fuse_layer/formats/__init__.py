"""Bytes of the undo log, sealed epochs and the kernel's FUSE protocol.

Encoding and decoding, without state. The package imports nothing else of the overlay.
"""
