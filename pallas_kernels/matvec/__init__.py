"""Matrix times the few vectors of a decode step, the norm before it, the residual after it: `gpu.matvec`, one launch.

The reference is what it replaces: `linear(norm(x), w)` of `seqmoe_jax.models.layers` in plain XLA.
"""

from pallas_kernels.matvec.config import MatvecConfig as MatvecConfig
