"""What a model takes of device and host memory, and whether that fits."""
