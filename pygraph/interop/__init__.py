"""Meeting other parts of PyTorch."""
