"""Natural language: blocks of tokens, classes, pairs, tags, questions and translations."""
