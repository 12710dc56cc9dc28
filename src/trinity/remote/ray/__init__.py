"""Instances on a Ray cluster. Nothing else imports this package but trinity's lazy door."""
