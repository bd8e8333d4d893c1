"""Planning on the device: which experts the forecast wants moved, in which slots, by when (paper 6.1, 7.2)."""

from pallas_kernels.plan_tasks.api import plan_tasks as plan_tasks
from pallas_kernels.plan_tasks.config import BASE as BASE
from pallas_kernels.plan_tasks.config import CHECK as CHECK
from pallas_kernels.plan_tasks.config import CONFIDENCE as CONFIDENCE
from pallas_kernels.plan_tasks.config import CONFIDENCE_UNIT as CONFIDENCE_UNIT
from pallas_kernels.plan_tasks.config import DEADLINE as DEADLINE
from pallas_kernels.plan_tasks.config import FIRST_TASK as FIRST_TASK
from pallas_kernels.plan_tasks.config import KEY as KEY
from pallas_kernels.plan_tasks.config import NUMBER as NUMBER
from pallas_kernels.plan_tasks.config import SLOT as SLOT
from pallas_kernels.plan_tasks.config import TAG as TAG
from pallas_kernels.plan_tasks.config import PlanConfig as PlanConfig
from pallas_kernels.plan_tasks.config import Planned as Planned
