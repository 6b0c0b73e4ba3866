"""The formats in which the kernels keep weights, one a file, and the registry that knows them all."""
