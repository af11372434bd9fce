"""Everything behind the paper's tables and figures. It needs a checkout and is not installed."""
