"""The rules of serving, on plain values: no transport, no cluster, no store."""
