"""`profile-show`: display, comparison and validation of profile documents, without torch."""
