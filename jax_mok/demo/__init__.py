"""The demo: a small byte-level MoE transformer trained on real text, in Flax or Equinox.

Model code to copy is in ``model_flax`` and ``model_equinox``; the rest (corpus, loop, checkpoints, report) is shared.
Needs the extra ``demo``.
"""
