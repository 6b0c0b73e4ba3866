"""Says whether speculation fits a target on this machine, and why."""
