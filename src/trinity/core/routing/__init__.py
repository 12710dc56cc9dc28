"""Choice of an instance for each stage of a request."""
