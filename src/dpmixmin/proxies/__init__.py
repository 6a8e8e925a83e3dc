"""Proxy models of the public sources, and their predictions."""
