"""Models, losses and records as pure functions of the weights."""
