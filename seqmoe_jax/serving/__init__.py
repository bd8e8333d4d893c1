"""An OpenAI-compatible HTTP server over one engine: requests queue up and are decoded in batches."""
