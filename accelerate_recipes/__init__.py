"""The command-line tool: find, copy, prove, check and look at recipes. The recipes and `common` do without it."""
