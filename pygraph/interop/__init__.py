"""Compilers of PyTorch that pygraph is a part of: the backend of ``torch.compile``."""
