"""Several front processes on one port: started, watched, and known to each other."""
