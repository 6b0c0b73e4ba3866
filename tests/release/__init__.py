"""Tests of what a release is made of."""
