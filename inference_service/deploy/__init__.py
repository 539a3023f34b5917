"""Deployments and rollouts: as clients ask for them, as the store keeps them, and as Ray Serve is made to run them."""
