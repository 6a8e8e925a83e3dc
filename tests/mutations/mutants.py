"""All mutants, by rule."""

from __future__ import annotations

from of_data import DATA
from of_deploy import DEPLOY
from of_ledger import LEDGER
from of_mechanisms import MECHANISMS
from of_noise import NOISE

MUTANTS = sorted((*NOISE, *MECHANISMS, *DATA, *LEDGER, *DEPLOY), key=lambda mutant: mutant.rule)

if len({(mutant.rule, mutant.name) for mutant in MUTANTS}) != len(MUTANTS):
    raise ValueError("two mutants of a rule have the same name")
