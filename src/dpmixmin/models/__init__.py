"""Builders of small networks, and what training with per-example gradients needs of them."""
