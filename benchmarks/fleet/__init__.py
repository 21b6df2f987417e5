"""Simulated fleet: many hosts on one remote, the real code of `ciuic.remote` against a model of an object store."""
