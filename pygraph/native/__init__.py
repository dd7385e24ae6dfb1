"""The call path in C++: a call like one before is recognised and replayed in a few microseconds.

`build` makes and loads the extension, `callpath` describes calls to it. Without a compiler, or with
``PYGRAPH_NATIVE=0``, every call takes the path in Python, which does the same.
"""
