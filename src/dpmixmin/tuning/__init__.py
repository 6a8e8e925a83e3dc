"""Choosing settings on public stand-ins, so that no private score is ever used (rule 9)."""
