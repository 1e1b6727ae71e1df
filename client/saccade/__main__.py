"""``python -m saccade``."""

import sys

from saccade.cli import main

sys.exit(main())
