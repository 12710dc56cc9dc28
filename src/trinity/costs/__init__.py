"""Seconds and bytes of a step, by roofline or measured tables; models, devices and pools by size."""
