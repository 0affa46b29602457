"""Search for the fastest plans of a request: search spaces, costs, solvers and their selection."""
