"""Where the preset tables of the library come from."""
