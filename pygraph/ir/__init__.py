"""Programs: what they are, which are legal, how they print, and what they mean."""
