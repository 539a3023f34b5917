"""`python -m millrace_client.cli` is the `millrace` command."""

from millrace_client.cli import main

main()
