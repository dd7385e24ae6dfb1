"""Conformance: every operator that PyTorch tests gives through `pygraph.jit` what it gives in eager.

What it shares with the benchmark of zero-copy replay (samples, comparison, worker processes) lies in ``benchmarks``.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
