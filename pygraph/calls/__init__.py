"""One call: its key, what is kept for it, and how it runs."""
