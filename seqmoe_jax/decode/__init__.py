"""One decode step for all sequences, as a single jitted computation (paper 8.1)."""
