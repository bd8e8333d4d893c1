"""Recorded expert activations: the file format, forecasts over a trace, recording, and stretching to other shapes."""
