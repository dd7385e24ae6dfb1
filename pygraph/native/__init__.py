"""The call path in C++: a call like one before is recognised and replayed in a few microseconds.

`pygraph.process.extension` builds and loads it, `pygraph.calls.plans` describes calls to it, and `dispatch.cpp` lists
its headers in the order of a call. Without a compiler, or with ``PYGRAPH_NATIVE=0``, every call takes the path in
Python, which does the same.
"""
