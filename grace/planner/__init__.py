"""The planner: strategies chosen by prediction, in no framework's terms."""
