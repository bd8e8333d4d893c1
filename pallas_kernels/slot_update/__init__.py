"""Cache management of one MoE layer as one kernel."""

from pallas_kernels.slot_update.api import slot_update as slot_update
from pallas_kernels.slot_update.tables import PROGRESS_UNIT as PROGRESS_UNIT
from pallas_kernels.slot_update.tables import UNDER_WAY as UNDER_WAY
from pallas_kernels.slot_update.tables import Rule as Rule
from pallas_kernels.slot_update.tables import SlotState as SlotState
from pallas_kernels.slot_update.tables import SlotTables as SlotTables
from pallas_kernels.slot_update.tables import SlotUpdate as SlotUpdate
