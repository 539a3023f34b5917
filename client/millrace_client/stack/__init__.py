"""The embedded stack: Ray and the three services on one machine, under one supervisor."""
