"""Train on scikit-learn's digits in a loop of your own, with compressed gradients. Six lines are Grace's: `# +`.

horovodrun -np 2 python examples/tensorflow/digits_tape.py --compressor "block(bits=4)"
mpirun -np 2 python examples/tensorflow/digits_tape.py       # with Horovod (make horovod) or mpi4py
python examples/tensorflow/digits_tape.py
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import grace  # +

parser = argparse.ArgumentParser(description="Train on scikit-learn's digits with compressed gradients.")
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

engine = grace.init(framework="tensorflow")  # +
keras.utils.set_random_seed(0)

x, y = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
mine = slice(grace.rank(), len(train_x) // grace.size() * grace.size(), grace.size())  # +
batches = tf.data.Dataset.from_tensor_slices((train_x[mine], train_y[mine])).shuffle(len(train_x)).batch(32)

layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input([64]), *layers])
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
exchange = grace.tensorflow.GradientExchange(args.compressor)  # +


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = grace.tensorflow.DistributedGradientTape(tape, exchange=exchange)  # +
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


for _ in range(args.epochs):
    for images, labels in batches:
        step(images, labels)

accuracy = (model(test_x).numpy().argmax(1) == test_y).mean()
if grace.rank() == 0:  # +
    print(f"{args.compressor} on {engine.describe()}")
    print(f"test accuracy {accuracy:.1%}, {exchange.traffic.sent_bytes:,} bytes sent by this rank")
