"""Object stores: one interface over S3, GCS, Azure, OSS and directories, and proof of what a store promises.

The rest of the remote knows a store only as `Objects` (model.py).
"""
