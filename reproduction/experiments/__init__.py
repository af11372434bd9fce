"""The paper's tables and figures: each is a grid of rows, and a page rendered from them."""
