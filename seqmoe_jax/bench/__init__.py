"""Measured decode speed of real shapes with routing replayed from a trace, and where the time goes."""
