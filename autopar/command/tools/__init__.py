"""Tools of the server: arguments, answers of limited length, and processes with a time limit."""
