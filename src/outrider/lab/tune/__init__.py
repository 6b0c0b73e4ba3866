"""Finds the settings that decode given traffic fastest."""
