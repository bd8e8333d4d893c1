"""Matrix times the few vectors of a decode step, with the norm before it and the residual after it. One launch.

The reference is what it replaces: `linear(norm(x), w)` of `seqmoe_jax.models.layers` in plain XLA.
"""

from pallas_kernels.matvec.config import Config as Config
from pallas_kernels.matvec.gpu import matvec as matvec
