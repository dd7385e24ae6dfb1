"""Rules that say how `devicify` rewrites an operation when one of its operands is a number from the host."""
