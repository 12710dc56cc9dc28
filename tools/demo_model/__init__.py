"""Training of the model that the demo asks (decision 0068): ``python -m tools.demo_model DIR``."""
