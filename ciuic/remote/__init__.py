"""Remotes: snapshots in an object store, shared by hosts, sealed, and read back from anywhere.

`docs/remote-format.md` has the bytes and the protocol. Guarantees: a snapshot that some log commits can be
restored exactly, whatever uploaders and collectors do or fail to do at the same time; nothing that was not
verified is returned. The package may import repository, maintenance, config and what lies below them; it
needs obstore, blake3 and cryptography, which nothing else imports.
"""
