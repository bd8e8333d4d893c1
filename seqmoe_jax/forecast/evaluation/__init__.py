"""How good a predictor is, and what it costs."""
