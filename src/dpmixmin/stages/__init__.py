"""Stages: thin commands that read files, call the library and write files (`python -m dpmixmin STAGE`)."""
