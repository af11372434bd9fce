"""Private training inside other libraries, and figures for experiment trackers.

Nothing here is imported with the library; each module needs the package that it is named after.
"""
