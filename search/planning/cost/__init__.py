"""Cost model of per-layer plans: from fitted profiles to the time and memory of table rows."""
