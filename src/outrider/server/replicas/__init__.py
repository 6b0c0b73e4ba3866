"""Several engines behind one address, on Ray Serve: an ingress without a model, and one engine a replica."""
