"""Options and inputs of a search request: command line, keywords, files and their defaults."""
