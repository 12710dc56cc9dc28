"""Instances on several hosts: files of hosts, their groups, and the keeper that starts instances on each."""
