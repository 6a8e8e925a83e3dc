"""Attacks on our own claims. The replay check is here; statistical audits follow the same interface."""
