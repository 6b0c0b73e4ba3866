"""Tuning: replays traffic, predicts and measures speed, and recommends settings."""
