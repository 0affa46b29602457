"""autopar-verify: profile this machine, search, run plans, and report the prediction errors."""
