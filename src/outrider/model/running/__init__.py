"""Layers with a running state: the functions that advance it, and how a pass of several texts computes them."""
