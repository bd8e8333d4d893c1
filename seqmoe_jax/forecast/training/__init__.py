"""Training a predictor on a trace (paper 5.4)."""
