"""Public helpers for tests of trinity and of code written against it."""
