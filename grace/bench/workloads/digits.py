"""A small image task: scikit-learn's handwritten digits, and a network that is small but not tiny."""

from grace.bench.workloads.task import LabelledTask

WIDTH = 512
"""Units of each of the two hidden layers of a multilayer perceptron (301,066 parameters)."""


class Digits(LabelledTask):
    """1,437 training and 360 test images of 8 x 8 pixels, scaled to [0, 1]; the same split in every run.

    One fifth of each digit's images is held out.
    """

    about = "scikit-learn's digits"
    metric, unit, scale = "accuracy", "%", 100.0
    target = 0.95
    lr, epochs, batch = 0.1, 20, 64

    def __init__(self) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        parts = train_test_split((x / 16).astype("float32"), y, test_size=0.2, random_state=0, stratify=y)
        self.train_x, self.test_x, self.train_y, self.test_y = parts
