"""Experiments of the paper that no command runs."""
