"""The choice of K experts by score from the router's logits, and their weights."""

from pallas_kernels.router_choice.api import router_choice as router_choice
from pallas_kernels.router_choice.config import Choice as Choice
from pallas_kernels.router_choice.config import Recorded as Recorded
from pallas_kernels.router_choice.config import unfit_choice as unfit_choice
