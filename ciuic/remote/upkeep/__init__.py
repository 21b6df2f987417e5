"""Upkeep of a remote for operators: collect what no snapshot needs, give up snapshots, check and repair, move packs to colder storage.

What these functions change goes through the protocol of logs and rounds, so that uploaders and other collectors may run
meanwhile.
"""
