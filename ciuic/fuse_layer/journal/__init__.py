"""The journal of a session: nodes, names, handles and changes in progress, for the successor of a killed worker.

Records are written before the answer to the kernel. The package may import `fuse_protocol` and `system`.
"""
