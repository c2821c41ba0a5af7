"""Training with transformers' own Trainer, padded and packed, on a backend that the model's config names."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import polyattn_transformers
from tiny_models import config_of

LENGTHS = [5, 9, 3, 7, 4, 8, 6, 2]


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


def examples():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 99, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]


def padded(features):
    longest = max(len(one["input_ids"]) for one in features)
    columns = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**one, "attention_mask": [1] * len(one["input_ids"])} for one in features]
    return {
        name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
        for name, fill in columns.items()
    }


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.values.append(logs["loss"])


def train(folder, implementation, collator, **arguments):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation=implementation)
    losses = Losses()
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **arguments,
    )
    trainer = Trainer(model, settings, train_dataset=examples(), data_collator=collator, callbacks=[losses])
    trainer.train()
    assert trainer.model.config._attn_implementation == implementation
    return losses.values


@pytest.mark.parametrize("arguments", [{}, {"gradient_checkpointing": True}], ids=["", "checkpointing"])
@pytest.mark.parametrize("collator", [padded, DataCollatorWithFlattening()], ids=["padded", "packed"])
def test_trainer_gives_the_losses_of_transformers_eager(collator, arguments, tmp_path):
    want = train(tmp_path, "eager", collator, **arguments)
    got = train(tmp_path, "polyattn_sdpa", collator, **arguments)
    assert got == pytest.approx(want, abs=2e-3)
    assert want[-1] != want[0]


def test_offsets_made_for_flash_attention_are_understood(tmp_path):
    want = train(tmp_path, "polyattn_sdpa", DataCollatorWithFlattening())
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    assert train(tmp_path, "polyattn_sdpa", collator) == pytest.approx(want, abs=1e-4)
