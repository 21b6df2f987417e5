"""Structure of the formats that checkpoints have, one module each, read through `ciuic.verdicts.model`.

A module says where the format's data must lie, and raises `TornContent`, `OtherFormat` or `NotJudged`. It may import nothing else of
ciuic.
"""
