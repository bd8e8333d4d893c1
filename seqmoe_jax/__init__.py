"""Mixture-of-Experts inference with most experts outside device memory, exactly."""
