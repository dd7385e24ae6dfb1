"""Parts of `devicify`: constants, uploads, operands of device operations, and the order of host work."""
