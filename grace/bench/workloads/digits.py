"""Small image tasks: scikit-learn's handwritten digits, by a multilayer perceptron and by a convolutional network."""

from grace.bench.workloads.task import LabelledTask

WIDTH = 512
"""Units of each of the two hidden layers of a multilayer perceptron (301,066 parameters)."""
CHANNELS, HIDDEN = (16, 32), 64
"""Channels of two 3 x 3 convolutions, and units of the hidden layer behind their 2 x 2 pooling (38,282 parameters)."""


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


class DigitsCNN(Digits):
    """Convolutional network on the digits.

    Its quality is the mean cross-entropy in nats on the test images: 2.3 is chance.
    """

    about = "scikit-learn's digits, convolutional network"
    metric, unit, scale, higher_is_better = "loss", "", 1.0, False
    target = 0.1
    optimizer, lr, adamw_lr, warmup, quick_epochs = "adamw", 0.05, 5e-3, 0.1, 8
