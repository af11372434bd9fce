"""The names that programs for Opacus import, on top of this library.

    from dpsur.opacus import PrivacyEngine
    from dpsur.opacus.utils.batch_memory_manager import BatchMemoryManager
    from dpsur.opacus.validators import ModuleValidator
    from dpsur.opacus.layers import DPLSTM

Modules lie at the paths that they have there. What is different is in docs/from_opacus.md.
"""

from dpsur.opacus.grad_sample import GradSampleModule
from dpsur.opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from dpsur.opacus.privacy_engine import PrivacyEngine
from dpsur.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpsur.opacus.validators import ModuleValidator

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "BatchMemoryManager",
    "DPMultiheadAttention",
    "GradSampleModule",
    "ModuleValidator",
    "PrivacyEngine",
]
