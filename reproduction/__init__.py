"""Everything behind the paper's tables and figures. It needs a checkout and is not installed.

Importing it registers the methods that the paper compares with, its networks, and its data sets as
tasks.
"""

import reproduction.methods
import reproduction.networks
import reproduction.tasks  # noqa: F401
