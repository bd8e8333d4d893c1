"""The choice of K experts from the router's logits, in one launch: `gpu.router_choice`.

The reference is the router that it serves, `seqmoe_jax.models.routers.RouterSpec`, in plain XLA.
"""
