"""The training loop: one object that knows how to take a step, to store itself and to come back.

Everything that a step depends on is in :meth:`Run.state`, so a resumed run equals an uninterrupted one bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from polyattn import AttentionRequest, AttentionScope, ConfigError, MaskLayout, UnsupportedAttentionError
from tiny_lm import checkpoint, ranks
from tiny_lm.checkpoint import CheckpointError
from tiny_lm.config import RunConfig
from tiny_lm.data import NO_TARGET, PackedRows, python_documentation
from tiny_lm.model import TinyLM


class Run:
    """A model in training.

    Attributes:
        losses: the mean loss in nats of every step so far; their number is the number of steps.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.mesh = ranks.mesh_of(config)
        self.rows = PackedRows(python_documentation(), **dataclasses.asdict(config.data), seed=config.seed)
        torch.manual_seed(config.seed)
        self.model = TinyLM(config.model, config.attention)
        self._refuse_what_cannot_run()
        self.model.to(config.device)
        optimiser = config.optimiser
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=optimiser.learning_rate, weight_decay=optimiser.weight_decay
        )
        self.losses: list[float] = []

    def step(self) -> float:
        """Take one step and return its loss."""
        done, device = len(self.losses), self.config.device
        batch = self.rows.batch(done)
        layout = MaskLayout.packed(batch.lengths).to(device)
        tokens, targets, positions = (x.to(device) for x in (batch.tokens, batch.targets, batch.positions))
        scope: MaskLayout | AttentionScope = layout
        if self.mesh is not None:  # this process holds some of the tokens
            parallel: Any = self.config.attention.scope(layout, self.mesh)
            tokens, targets, positions = map(parallel.shard.take, (tokens, targets, positions))
            scope = parallel
        with torch.autocast(device, dtype=self.dtype, enabled=self.config.autocast != "off"):
            logits = self.model(tokens, scope, positions)
        flat = logits.float().flatten(0, 1)
        loss = F.cross_entropy(flat, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
        loss = loss / (batch.targets != NO_TARGET).sum().item()
        self.optimiser.zero_grad()
        loss.backward()
        loss = loss.detach()
        if self.mesh is not None:
            ranks.add_up([loss, *(p.grad for p in self.model.parameters() if p.grad is not None)])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimiser.clip)
        warmth = min(1.0, (done + 1) / self.config.optimiser.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.optimiser.learning_rate * warmth
        self.optimiser.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, and what a run that resumes from it must share."""
        return {
            "identity": self._identity(),
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any], source: Path) -> None:
        """Go on where ``state`` was taken.

        Raises:
            CheckpointError: the state belongs to another model, text, seed or optimiser.
        """
        mine, other = self._identity(), state["identity"]
        differing = [key for key in mine if mine[key] != other.get(key)]
        if differing:
            texts = [f"{key} was {other.get(key)}, is {mine[key]}" for key in differing[:3]]
            raise CheckpointError(
                f"checkpoint {source} belongs to another run: {'; '.join(texts)}; "
                "resume with the config it was made with, or start again with another --out"
            )
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"])
        self.losses = state["losses"]

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys and values."""
        dtype = torch.float32 if self.config.autocast == "off" else getattr(torch, self.config.autocast)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _refuse_what_cannot_run(self) -> None:
        """Ask the backends about the first step, before anything is put on the device.

        Raises:
            UnsupportedAttentionError: a backend cannot run or train this; carries all its reasons.
            ConfigError: there is no such device.
        """
        config = self.config
        layout = MaskLayout.packed(self.rows.batch(0).lengths)
        for layer in {config.attention.layer(index) for index in range(config.model.layers)}:
            spec = layer.spec
            request = AttentionRequest(
                batch=config.data.rows,
                heads=spec.num_heads,
                kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                v_head_dim=spec.v_head_dim,
                dtype=self.dtype,
                device=torch.device(config.device),
                scale=spec.scale,
                dropout_p=spec.dropout,
                training=True,
                softcap=spec.softcap,
                has_sinks=spec.sinks,
                needs_grad=True,
            )
            reasons = layer.backend.unsupported(layout.with_window(spec.window), request)
            if reasons:
                raise UnsupportedAttentionError(layer.backend.name, reasons)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device: cuda needs a GPU that torch can use, found none; set device: cpu")

    def _identity(self) -> dict[str, Any]:
        """What may not change within a run. The backend, the number of steps and how often to save may."""
        config = self.config
        sections = {name: dataclasses.asdict(getattr(config, name)) for name in ("model", "data", "optimiser")}
        identity = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
        for index in range(config.model.layers):
            for name, value in config.attention.layer(index).spec.to_dict().items():
                identity[f"{name} of layer {index}"] = value
        return identity | {"seed": config.seed, "text": self.rows.digest()}


def train(
    run: Run, checkpoint_path: Path, *, stop: Callable[[], bool], on_step: Callable[[float, float], None]
) -> float:
    """Train until the config's number of steps, or until ``stop()``; the checkpoint is up to date afterwards.

    Args:
        run: the run, new or restored.
        checkpoint_path: where to save, every ``checkpoint_every`` steps and at the end.
        stop: asked before each step.
        on_step: told the loss and the tokens per second so far, after each step.

    Returns:
        Tokens per second, saving left out; 0 when there was no step to take.
    """
    config = run.config
    seconds, speed = 0.0, 0.0
    for count in itertools.count(1):
        if len(run.losses) >= config.steps or ranks.any_of(stop()):
            break
        start = time.perf_counter()
        loss = run.step()
        seconds += time.perf_counter() - start
        speed = count * config.data.rows * config.data.row_length / seconds
        on_step(loss, speed)
        if len(run.losses) % config.checkpoint_every == 0 and ranks.is_first():
            checkpoint.save(checkpoint_path, run.state())
    if ranks.is_first():
        checkpoint.save(checkpoint_path, run.state())
    return speed


def peak_memory() -> int | None:
    """The most memory that this process has held so far, in bytes; ``None`` where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would also count what the parent process held before it started this one.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows has no such module
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
