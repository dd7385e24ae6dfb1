"""Transformed functions inside torch.func's transforms and under autograd."""
