"""What two or more services need, one concept a file."""
