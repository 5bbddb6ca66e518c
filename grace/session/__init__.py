"""Steps of a whole model, independent of the framework: plans, buckets, agreement of ranks, and checkpoints.

Each framework has a class ``Session`` of its own, in ``torch/session.py`` and ``tensorflow/session.py``, which drives a
:class:`~grace.session.step_runner.StepRunner`.
"""
