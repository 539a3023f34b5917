"""What is known of a version, arranged for people: in a terminal and as a page."""
