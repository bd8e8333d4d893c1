"""Recorded expert activations: the file format, forecasts over a trace, and the simulator."""
