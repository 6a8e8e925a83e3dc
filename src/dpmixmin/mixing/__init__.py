"""Learning mixture weights from an n-by-k table of proxy predictions. No torch."""
