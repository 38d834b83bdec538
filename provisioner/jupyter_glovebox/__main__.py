"""`python -m jupyter_glovebox`: the same as `jupyter glovebox`."""

import sys

from .cli import main

sys.exit(main())
