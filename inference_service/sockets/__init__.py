"""The short way between a front and the replicas on its machine: Unix sockets beside Ray's calls."""
