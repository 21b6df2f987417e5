"""Files of chunks: read single chunks, many in order, or many into memory of the caller.

The package may import codecs, formats and the disk.
"""
