"""How `pygraph.trace` works: two runs of the function, and what is read off them."""
