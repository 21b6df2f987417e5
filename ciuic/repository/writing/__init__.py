"""The writer: adding and removing, with claims, recovery and maintenance of packs.

Every change of a repository is made here. The package may import everything else of the repository but the
public `Repository`, which it sees through `OpenRepository` (writer.py).
"""
