"""What belongs to the whole process: the extension, the cache on disk, garbage collection, turns of threads."""
