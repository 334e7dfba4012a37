"""The command line: `commands`, `doctor` and the models of users."""
