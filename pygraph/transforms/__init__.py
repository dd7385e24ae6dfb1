"""One transform a module, each a pure function from Program to Program."""
