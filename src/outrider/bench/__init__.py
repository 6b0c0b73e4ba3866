"""The benchmark: it measures in interleaved rounds what speculation is worth on this machine."""
