"""On the path of Pythons that must start with something done."""
