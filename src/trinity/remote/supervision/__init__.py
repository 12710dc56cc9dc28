"""Instances in processes: starting, watching, restarting and attaching them."""
