"""The requests that are proven: every method, rule, shape and parameter, with injected faults."""
