"""State of the whole process: the extension, the cache on disk, garbage collection, calls inside of calls."""
