"""trinity."""
