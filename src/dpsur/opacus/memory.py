"""`BatchMemoryManager`."""

from dpsur.engine.loader import BatchMemoryManager

__all__ = ["BatchMemoryManager"]
