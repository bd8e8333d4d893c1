"""Reading prompts: layer by layer, every expert moved at most once for each pass (paper 8.4)."""
