"""What distributed optimizers save and restore, on every engine."""

from __future__ import annotations

from typing import Any

import torch

from grace import checkpoint
from grace.errors import ConfigError
from grace.exchange import Traffic
from grace.torch.session import Session


class StateMixin:
    """State and traffic of a distributed optimizer, beside those of the user's."""

    _grace: Session

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the groups of the exchange are fixed when the optimizer is made distributed."""
        raise ConfigError(
            "add the parameter group to the optimizer before grace.DistributedOptimizer, which fixes what is "
            "exchanged together"
        )

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's state, and under "grace" what this rank remembers."""
        state = super().state_dict()  # type: ignore[misc]
        state["grace"] = checkpoint.save(self._grace.exchanger)
        return state

    def full_state_dict(self) -> dict[str, Any]:
        """Like ``state_dict()``, with every rank's memories, for one file that loads on any number of ranks.

        Every rank must call it; save it on one."""
        state = super().state_dict()  # type: ignore[misc]
        state["grace"] = checkpoint.gather(self._grace.exchanger)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], memory: str = "strict") -> None:
        """Restore. A run that is stopped and resumed continues bit for bit.

        Args:
            state_dict: from ``state_dict()`` of the same rank, or from ``full_state_dict()``.
            memory: "strict", or "reset" to start with empty memories.

        Raises:
            ConfigError: the memories belong to another rank, number of ranks or method.
        """
        plain = {key: value for key, value in state_dict.items() if key != "grace"}
        saved = state_dict.get("grace")
        session = self._grace
        saved = saved and on_devices(saved, session.parameters)
        checkpoint.load(session.exchanger, saved, memory)
        super().load_state_dict(plain)  # type: ignore[misc]

    @property
    def strategy(self) -> Any:
        """The :class:`~grace.strategy.plan.Strategy` that is executed; None if there is one method for all."""
        return self._grace.strategy

    @property
    def traffic(self) -> Traffic:
        """What was exchanged so far, counted."""
        return self._grace.exchanger.traffic


def _device_of(key: Any, parameters: dict[str, torch.nn.Parameter], usual: Any) -> Any:
    """Of a variable, or of one that a piece is of."""
    whole = key if key in parameters else str(key).rpartition("/part_")[0]
    return parameters[whole].device if whole in parameters else usual


def on_devices(saved: Any, parameters: dict[str, torch.nn.Parameter], device: Any = "cpu") -> Any:
    """The saved state with each variable's tensors on its parameter's device."""
    if isinstance(saved, torch.Tensor):
        return saved.to(device, copy=True)
    if isinstance(saved, dict):
        return {key: on_devices(value, parameters, _device_of(key, parameters, device)) for key, value in saved.items()}
    if isinstance(saved, list):
        return [on_devices(value, parameters, device) for value in saved]
    return saved
