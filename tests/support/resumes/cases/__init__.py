"""Trainings that resume by themselves, one module per framework.

Each has ``MODULES`` (imported before the first fork), ``WORLD`` (number of processes), ``BY_DESIGN`` (reported
values that a resume does not give back, with the reason that the documentation gives) and ``train``. One that has
``WORLDS`` runs on so many ranks in turn, and reports each state that it saves and each that it resumes from. Ranks are connected before
``train``, unless the case has ``CONNECTS_RANKS``.
"""

from __future__ import annotations

from typing import Final

NEEDED: Final = {
    "cnn": "torch",
    "hugging_face": "transformers",
    "lightning_fit": "lightning",
    "lightning_fit@2": "lightning",
    "keras_fit": "keras",
    "ddp": "torch",
    "ddp@4": "torch",
    "flax_loop": "flax",
    "fsdp": "torch",
    "fsdp_elastic": "torch",
    "tensor_parallel": "torch",
    "accelerate_loop": "accelerate",
    "deepspeed_loop-1": "deepspeed",
    "deepspeed_loop-2": "deepspeed",
    "deepspeed_loop-3": "deepspeed",
}
"""The module of the framework that each case needs, by case; ``@`` and a number: the case on so many ranks; ``-`` and a text:
the variant."""
