"""The `seqmoe` command: one module per command. They parse arguments and print; the work is done elsewhere."""
