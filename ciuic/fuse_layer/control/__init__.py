"""The worker's end of its control channel; the other end and the frames are in `ciuic.protocol`.

The package may import tracking and the library.
"""
