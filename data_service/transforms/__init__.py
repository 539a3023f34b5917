"""Makes a version out of another: Ray Data spreads its parts over the cluster, each is worked on within one task."""
