"""Operators that no library gives: matrix products at the few rows of a verify pass."""
