"""Kinds of media: what an item costs, and how it is decoded and preprocessed."""
