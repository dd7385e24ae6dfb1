"""What a trace took for granted of Python's state: code, and iterators."""
