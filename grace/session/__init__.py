"""Steps of a whole model, independent of the framework, whose own class ``Session`` drives a ``StepRunner``."""
