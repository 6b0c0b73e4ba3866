"""The instrument: what speculation is worth on this machine, measured in interleaved rounds."""
