"""`BatchMemoryManager`."""

from dpsur.engine.microbatches import BatchMemoryManager

__all__ = ["BatchMemoryManager"]
