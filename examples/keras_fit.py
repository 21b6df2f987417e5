"""Keras 3 training that resumes by itself: run it, kill it, run it again.

python examples/keras_fit.py [directory for snapshots]
"""

import sys

import keras
import numpy

from ciuic.integrations.keras import SnapshotCallback

save_dir = sys.argv[1] if len(sys.argv) > 1 else "./snapshots"
keras.utils.set_random_seed(1)  # also fixes the order of the data
x = numpy.random.default_rng(2).random((80, 8), "float32")
y = (x.sum(axis=1) > 4).astype("float32")
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), loss="binary_crossentropy", metrics=["accuracy"])
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    validation_data=(x[:16], y[:16]),
    callbacks=[SnapshotCallback(save_dir, save_freq=4)],
    verbose=0,
)
print("trained", history.history)
