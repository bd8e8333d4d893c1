"""Checkpoints -> arrays without torch: safetensors files, name maps of the families, quantised formats."""
