"""What maintainers run on a real model and device, where a test would take too long."""
