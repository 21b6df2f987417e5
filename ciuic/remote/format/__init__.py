"""Bytes of a remote: names, remote.json, packs, log entries, manifests and rounds (docs/remote-format.md).

Each module encodes and decodes one kind of object and checks the same limits both ways; what is read may be
hostile. The room may import sealing, objects, errors and ciuic.repository; it knows no protocol.
"""
