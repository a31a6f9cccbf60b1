"""What Ray sets aside for each process of a stage, and on which nodes: settings that several stages share."""

from __future__ import annotations

from dataclasses import dataclass

from stages.fields import execution, require


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
            require(label != "" and wanted != "", f"{stage}.label_selector", self.label_selector,
                    "labels and their values must not be empty")  # fmt: skip
