"""On-demand loading of missing experts from host memory as one kernel."""

from pallas_kernels.miss_load.api import miss_load as miss_load
from pallas_kernels.miss_load.config import MissLoadConfig as MissLoadConfig
