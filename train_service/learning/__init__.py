"""What a rank computes in a step: the model, its loss, optimizer and metrics, on one rank or sharded over all."""
