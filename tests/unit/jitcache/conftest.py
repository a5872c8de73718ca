"""Makes tests/unit/abi/make.py importable: it writes small ELF files."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "abi"))
