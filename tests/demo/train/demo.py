"""Makes the modules of deploy/demo importable: import this one before them."""

import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[3] / "deploy/demo"
sys.path.insert(0, str(DEMO))
