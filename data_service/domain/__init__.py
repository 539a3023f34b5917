"""Pure rules of the data service: no transport, no cluster, no store, no generated code."""
