"""Matrix times the few vectors of a decode step, with the norm before it and the residual after it."""

from pallas_kernels.matvec.api import matvec as matvec
from pallas_kernels.matvec.config import MatvecConfig as MatvecConfig
from pallas_kernels.matvec.config import Product as Product
from pallas_kernels.matvec.config import unfit_batch as unfit_batch
