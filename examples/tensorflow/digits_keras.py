"""Train a small Keras model on scikit-learn's digits, with compressed gradients. Six lines are Grace's: `# +`.

horovodrun -np 2 python examples/tensorflow/digits_keras.py --compressor "block(bits=4)"
mpirun -np 2 python examples/tensorflow/digits_keras.py       # with Horovod (make horovod) or mpi4py
python examples/tensorflow/digits_keras.py
"""

import argparse

import keras
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

layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input([64]), *layers])
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
optimizer = grace.DistributedOptimizer(optimizer, compressor=args.compressor)  # +
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)

callbacks = [grace.tensorflow.BroadcastCallback(), grace.tensorflow.MetricAverageCallback()]  # +
model.fit(train_x[mine], train_y[mine], batch_size=32, epochs=args.epochs, callbacks=callbacks, verbose=0)

_, accuracy = model.evaluate(test_x, test_y, verbose=0)
if grace.rank() == 0:  # +
    print(f"{args.compressor} on {engine.describe()}")
    print(f"test accuracy {accuracy:.1%}, {optimizer.traffic.sent_bytes:,} bytes sent by this rank")
