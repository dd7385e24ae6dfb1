"""From ATen operations to kernels."""
