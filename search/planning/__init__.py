"""From a question to the fastest plans: spaces, costs, searches and who answers."""
