"""What commands are made of: the dialect of their options."""
