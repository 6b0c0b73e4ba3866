"""Operators that no library offers: matrix products with the few rows of a verify pass, and what goes with them."""
