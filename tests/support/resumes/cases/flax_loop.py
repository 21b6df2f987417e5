"""JAX in a loop of its own: a Flax model with batch statistics and dropout, an optax optimizer, and keys of JAX."""

from __future__ import annotations

from typing import Any, Final

import jax  # type: ignore[import-not-found, unused-ignore]
import numpy
import optax  # type: ignore[import-not-found, unused-ignore]
from flax import linen  # type: ignore[import-not-found, unused-ignore]
from support.resumes.child import ResumedRun, generators

from ciuic import SnapshotManager

MODULES: Final = "jax jax.numpy flax.linen optax"
WORLD: Final = 1
BY_DESIGN: Final[dict[str, str]] = {}
_STEPS: Final = 120


class Network(linen.Module):  # type: ignore[misc, unused-ignore]
    @linen.compact  # type: ignore[untyped-decorator, unused-ignore]
    def __call__(self, x: Any) -> Any:
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(32)(x))
        return linen.Dense(3)(linen.Dropout(0.2, deterministic=False)(linen.relu(x)))


class TrainingState:
    """Weights, statistics, moments and key as one tree, of which a snapshot has the leaves."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def state_dict(self) -> dict[str, Any]:
        # Copied to the host: an update that donates its arguments frees the arrays on the device.
        leaves = jax.device_get(jax.tree_util.tree_leaves(self.tree))
        return {str(number): numpy.asarray(leaf) for number, leaf in enumerate(leaves)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        leaves, structure = jax.tree_util.tree_flatten(self.tree)
        loaded = [jax.numpy.asarray(state[str(number)]) for number in range(len(leaves))]
        self.tree = jax.tree_util.tree_unflatten(structure, loaded)


def train(run: ResumedRun) -> None:
    """Train with data that NumPy's global generator draws."""
    numpy.random.seed(1)
    network, optimizer = Network(), optax.adamw(optax.cosine_decay_schedule(1e-2, 100))
    key = jax.random.PRNGKey(2)
    made = network.init({"params": key, "dropout": key}, numpy.zeros((4, 8), "float32"))
    training = TrainingState((made, optimizer.init(made["params"]), key))
    losses: list[float] = []
    manager = SnapshotManager(run.save_dir, every_steps=4, max_snapshots=4)
    manager.register(training=training, losses=losses)
    manager.resume()

    def update(tree: Any, x: Any) -> tuple[Any, Any]:
        variables, moments, key = tree
        key, own = jax.random.split(key)

        def loss_of(weights: Any) -> tuple[Any, Any]:
            out, changed = network.apply(
                {**variables, "params": weights}, x, rngs={"dropout": own}, mutable=["batch_stats"]
            )
            return (out**2).mean(), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
        steps, moments = optimizer.update(gradients, moments, variables["params"])
        weights = optax.apply_updates(variables["params"], steps)
        return ({"params": weights, **changed}, moments, key), loss

    compiled = jax.jit(update, donate_argnums=0)
    while len(losses) < _STEPS:
        training.tree, loss = compiled(training.tree, numpy.random.rand(4, 8).astype("float32"))
        losses.append(float(loss))
        run.report(f"batch {len(losses)}", {"loss": loss})
        run.stepped()
        manager.step = len(losses)
        manager.boundary()
    manager.close()
    run.finish(training.state_dict() | generators(), {"losses": losses})
