"""Instances in other processes, and the control plane that reaches them."""
