"""What `profile-show` shows, compares and validates: profile documents, read without torch."""
