"""Between the wire's messages and the service's own values."""
