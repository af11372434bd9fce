"""The accountants. Nothing here knows of tensors or training."""
