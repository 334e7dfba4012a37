"""The command line. Read `commands`, then `planning`, the memory commands: `request`, `source`, `account`."""
