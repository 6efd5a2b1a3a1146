"""`python -m compare`: the command line."""

import sys

from compare.cli import main

sys.exit(main())
