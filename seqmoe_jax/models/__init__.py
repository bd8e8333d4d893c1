"""What a layer computes. Knows nothing of offloading: the caller says how a MoE layer's experts are applied."""
