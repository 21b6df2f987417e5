"""Upkeep of a remote for operators: free space, give up snapshots, check and repair.

What these functions change goes through the protocol of logs and rounds, so that uploaders and other collectors may run
meanwhile. The room may import every other room of ciuic.remote.
"""
