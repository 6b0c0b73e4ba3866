"""The methods, one a file, with what only they need."""
