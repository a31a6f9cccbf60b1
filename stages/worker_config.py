"""What Ray sets aside for each process of a stage, and on which nodes: settings that several stages share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stages.fields import execution, require

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:{_DOMAIN}/)?{_WORD}")
_SELECTED = re.compile(rf"!?(?:{_WORD}|in\({_WORD}(?:, ?{_WORD})*\))")
"""Source: Ray 2.60, `_private/label_utils.py`, which looks only when the first worker is asked for. `(a)` alone, which
it takes too, is left out: it says nothing that `a` does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Resources of one process: a worker, a member of a tensor-parallel group, or a rank."""

    gpus: float | None = execution(None)
    """GPUs of each process, below 1 for a part of one. None takes one where the driver's machine or the cluster has any
    when the stage starts; a cluster that gets its GPU nodes only later needs the number here."""
    memory_bytes: int | None = execution(None)
    """Memory that Ray counts for each process, so that it does not put more of them on a node than fit; None: none."""
    resources: dict[str, float] = execution(factory=dict)
    """Custom resources of each process, by the names that nodes were started with: `{spot: 0.001}` wants a node
    that has `spot`."""
    label_selector: dict[str, str] = execution(factory=dict)
    """Labels of the nodes that may be used, as Ray selects by them: `{ray.io/market-type: spot}`, `"!spot"`,
    `"in(a, b)"`."""

    def require_worker(self, stage: str) -> None:
        """Check the settings of this class; called by those that have them.

        Raises:
            ConfigError: a value that no run could use.
        """
        gpus, memory = self.gpus, self.memory_bytes
        rule = "it must be a whole number, a part of one GPU (0.5), or absent"
        ok = gpus is None or 0 <= gpus < 1 or (1 <= gpus < 1024 and gpus == int(gpus))
        require(ok, f"{stage}.gpus", gpus, rule)
        require(memory is None or memory > 0, f"{stage}.memory_bytes", memory, "it must be above 0, or absent")
        for name, amount in self.resources.items():
            rule = "it must be above 0; CPUs, GPUs and memory have settings of their own (threads, gpus, memory_bytes)"
            ok = 0 < amount < float("inf") and name not in ("", "CPU", "GPU", "memory", "object_store_memory")
            require(ok, f"{stage}.resources.{name}", amount, rule)
        for label, wanted in self.label_selector.items():
            rule = "a label is up to 63 letters, digits, '.', '_' or '-', as in ray.io/market-type"
            require(_LABEL.fullmatch(label) is not None, f"{stage}.label_selector: a label", label, rule)
            rule = "Ray selects by `value`, `!value`, `in(a, b)` or `!in(a, b)`; a value is written like a label"
            require(_SELECTED.fullmatch(wanted) is not None, f"{stage}.label_selector.{label}", wanted, rule)
