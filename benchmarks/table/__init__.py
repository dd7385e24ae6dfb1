"""The table of 25 workloads: ``python -m pygraph bench``."""
