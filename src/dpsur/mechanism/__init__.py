"""The mechanism: sampling, clipping, noise, update, test, and the loop around them."""
