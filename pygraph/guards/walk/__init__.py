"""The walk over what a function can reach besides its arguments: closures, globals, modules, objects behind them.

`rules` has one rule for every kind of object. A rule guards and copies what the object holds and has the walk visit it.
"""
