"""What a session feeds to its caches: inputs that need no model, the same for the same position."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_driver.config import ModelConfig

F32 = npt.NDArray[np.float32]


class Inputs:
    """What a model's projections would bring to one sequence: unit-normal rows, gates in the models' range.

    A fixed function of (seed, sequence, layer, position), so a replayed token brings the same rows. The weights
    are those of the model, the same for every sequence.
    """

    def __init__(self, cfg: ModelConfig, seed: int, sequence: int = 0) -> None:
        self.cfg, self.seed, self.sequence = cfg, seed, sequence
        self._rows: dict[tuple[int, str, int, int], F32] = {}

    def rows(self, il: int, name: str, columns: int, start: int, count: int) -> F32:
        """[count, columns] of positions start ..: the same row for the same position, whatever the call."""
        return np.stack([self._row(il, name, columns, start + i) for i in range(count)])

    def weights(self, il: int) -> dict[str, F32]:
        """Per-layer constants of a recurrent layer: w [conv_dim, d_conv], dt_bias and a [num_v]."""
        ssm = self.cfg.ssm
        assert ssm is not None
        random = self._generator("weights", il)
        return {
            "w": random.normal(0, 0.4, (ssm.conv_dim, ssm.conv_kernel)).astype(np.float32),
            "dt_bias": random.uniform(-3, 1, ssm.time_step_rank).astype(np.float32),
            "a": -random.uniform(0.05, 4, ssm.time_step_rank).astype(np.float32),
        }

    def forget_before(self, position: int) -> None:
        """Drops rows that nobody will ask for again."""
        self._rows = {key: row for key, row in self._rows.items() if key[3] >= position}

    def _row(self, il: int, name: str, columns: int, position: int) -> F32:
        key = (il, name, columns, position)
        if key not in self._rows:
            random = self._generator(self.sequence, il, name, position)
            self._rows[key] = random.standard_normal(columns, np.float32)
        return self._rows[key]

    def _generator(self, *what: Any) -> np.random.Generator:
        words = hashlib.blake2b("/".join(map(str, (self.seed, *what))).encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(words, np.uint64)))


class Weights:
    """The weights of each recurrent layer on its device, uploaded at first use."""

    def __init__(self, device_of: Callable[[int], Any], inputs: Inputs) -> None:
        self.device_of, self.inputs = device_of, inputs
        self._layers: dict[int, dict[str, Any]] = {}

    def of(self, il: int) -> dict[str, Any]:
        """w, dt_bias and a of layer il."""
        if il not in self._layers:
            kept = self._layers[il] = {}
            for name, array in self.inputs.weights(il).items():
                kept[name] = self.device_of(il).uninit(array.size)
                kept[name].copy_from(array.reshape(-1))
        return self._layers[il]

    def close(self) -> None:
        """Frees them."""
        for layer in self._layers.values():
            for each in layer.values():
                each.close()
