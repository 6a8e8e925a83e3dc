"""Everything that protects: noise, mechanism specs, accounting, composition, the ledger. No torch at import."""
