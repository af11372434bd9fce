"""Private training in a custom loop: the private optimizer, loader and model calls."""
