"""Private training inside other libraries.

Nothing here is imported with the library; each module needs the package that it is named after.
"""
