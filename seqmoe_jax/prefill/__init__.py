"""Reading prompts: layer by layer, every expert moved at most once for each pass (paper 8.4).

`lengths` says how prompts are cut, `experts` is a MoE layer over a prompt, `programs` are the jitted parts of a pass
and `reader` is the host's loop over them. `replay` forces recorded routing, for benchmarks.
"""
