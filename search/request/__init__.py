"""Options and inputs of a question: command line, keywords, files and their defaults."""
