"""`python -m reproduction.page_figures`."""

import sys

from reproduction.page_figures.pages import main

if __name__ == "__main__":
    sys.exit(main())
