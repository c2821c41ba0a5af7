from __future__ import annotations

import pytest
import torch

from tiny_lm import checkpoint, config
from tiny_lm.checkpoint import CheckpointError
from tiny_lm.train import Run, peak_memory, train


@pytest.fixture
def load(settings, write_config):
    def load(*, model=None, **changes):
        settings["model"] |= model or {}
        return config.load(write_config(settings | changes))

    return load


def finish(run, path, *, until=None):
    return train(
        run, path, stop=lambda: until is not None and len(run.losses) >= until, on_step=lambda loss, speed: None
    )


def assert_same_state(mine, other):
    assert mine.losses == other.losses
    for (name, a), b in zip(mine.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(
        mine.optimiser.state_dict()["state"].values(), other.optimiser.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_one_step_is_the_same_under_both_backends(load):
    eager, sdpa = Run(load(attn_backend="eager")), Run(load(attn_backend="sdpa"))
    assert eager.step() == pytest.approx(sdpa.step(), abs=1e-6)
    for (name, a), b in zip(eager.model.named_parameters(), sdpa.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_training_lowers_the_loss(load, tmp_path):
    run = Run(load(steps=40))
    assert finish(run, tmp_path / "checkpoint.pt") > 0
    assert run.losses[-1] < run.losses[0] - 1


def test_one_mask_and_one_rotary_table_serve_all_layers(load, monkeypatch):
    from tiny_lm import model

    scopes = []

    class Recorded(model.AttentionScope):
        def __init__(self, layout):
            super().__init__(layout)
            scopes.append(self)

    monkeypatch.setattr(model, "AttentionScope", Recorded)
    Run(load(model={"layers": 3})).step()
    assert [scope.builds for scope in scopes] == [{"attention": 1, "rotary": 1}]


@pytest.mark.parametrize("backend, dropout", [("sdpa", 0.0), ("eager", 0.2)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(load, tmp_path, backend, dropout):
    settings = load(attn_backend=backend, model={"dropout": dropout})
    path = tmp_path / "checkpoint.pt"
    whole = Run(settings)
    finish(whole, tmp_path / "whole.pt")
    finish(Run(settings), path, until=3)
    torch.rand(7)  # whatever happens to the generator in between
    resumed = Run(settings)
    resumed.restore(checkpoint.load(path), path)
    finish(resumed, path)
    assert_same_state(resumed, whole)


def test_a_run_may_go_on_with_another_backend_and_more_steps(load, tmp_path):
    path = tmp_path / "checkpoint.pt"
    finish(Run(load(attn_backend="eager", steps=2)), path)
    run = Run(load(attn_backend="sdpa", steps=4))
    run.restore(checkpoint.load(path), path)
    finish(run, path)
    assert len(run.losses) == 4


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"model": {"layers": 1}}, "model.layers was 2, is 1"),
        ({"rope": None}, "rope of layer 0 was .*is None"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference(load, tmp_path, change, said):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, Run(load()).state())
    with pytest.raises(CheckpointError, match=f"belongs to another run: .*{said}"):
        Run(load(**change)).restore(checkpoint.load(path), path)


@pytest.mark.parametrize("damage", ["cut short", "one bit flipped", "empty", "another file"])
def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(load, tmp_path, damage):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, Run(load()).state())
    content = bytearray(path.read_bytes())
    if damage == "one bit flipped":
        content[len(content) // 2] ^= 1
    damaged = {"cut short": content[:-100], "empty": b"", "another file": b"PK\x03\x04 not ours"}.get(damage, content)
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"checkpoint .* is damaged: .* --out"):
        checkpoint.load(path)
    assert path.read_bytes() == bytes(damaged)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(load, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"losses": [1.0]})

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be written: no space left on device; what was"):
        checkpoint.save(path, {"losses": [2.0]})
    assert checkpoint.load(path) == {"losses": [1.0]}
    assert list(tmp_path.iterdir()) == [path]


def test_peak_memory_counts_bytes():
    held = torch.ones(64 * 2**20)
    assert held.numel() * held.element_size() <= peak_memory() < 2**40
