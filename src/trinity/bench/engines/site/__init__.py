"""Startup code for the Pythons of engines that need a patch before they import anything."""
