"""`BatchMemoryManager` where programs for Opacus import it from."""

from dpsur.engine.microbatches import BatchMemoryManager

__all__ = ["BatchMemoryManager"]
