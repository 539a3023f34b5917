"""What runs in a replica: a checkpoint as a function of rows, in a process that Ray Serve keeps."""
