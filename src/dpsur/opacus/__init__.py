"""The names that programs for Opacus import, on top of this library.

    from dpsur.opacus import PrivacyEngine
    from dpsur.opacus.utils.batch_memory_manager import BatchMemoryManager
    from dpsur.opacus.validators import ModuleValidator
    from dpsur.opacus.layers import DPLSTM

Every path of Opacus 1.6 can be imported (`names.py`). What is different is in docs/from_opacus.md.
"""

from dpsur.engine.loader import BatchMemoryManager
from dpsur.opacus import names
from dpsur.opacus.modules import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from dpsur.opacus.privacy_engine import PrivacyEngine
from dpsur.opacus.validation import ModuleValidator

GradSampleModule = names.find("GradSampleModule")
GradSampleModuleFastGradientClipping = names.find("GradSampleModuleFastGradientClipping")

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "BatchMemoryManager",
    "DPMultiheadAttention",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "ModuleValidator",
    "PrivacyEngine",
]
