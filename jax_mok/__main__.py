"""``python -m jax_mok``."""

from jax_mok.cli import main

main()
