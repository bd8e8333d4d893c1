"""Small matrices made doubly stochastic, one for each token."""

from pallas_kernels.sinkhorn.api import sinkhorn as sinkhorn
