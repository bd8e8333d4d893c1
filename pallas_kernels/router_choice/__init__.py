"""The choice of K experts from the router's logits. One launch.

The reference is the router that it serves, `seqmoe_jax.models.routers.RouterSpec`, in plain XLA.
"""

from pallas_kernels.router_choice.gpu import router_choice as router_choice
