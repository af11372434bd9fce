"""Everything behind the paper's tables and figures. It needs a checkout and is not installed.

Importing it registers the methods that the paper compares with.
"""

import reproduction.methods  # noqa: F401
