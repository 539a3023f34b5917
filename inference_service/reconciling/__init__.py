"""Makes Ray Serve run what the records of deployments and roll-outs say."""
