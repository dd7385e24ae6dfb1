"""Known faults, put into copies of the package one at a time, to see whether the short run catches them."""
