"""Lets these tests plant the faults that the proof is tested with."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "verify"))
