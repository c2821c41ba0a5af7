"""Whoever walks the modules of a model that was built on meta initialises all of it."""

import copy

import pytest
import torch
import transformers
from torch import nn

from decoder import SEGMENTATIONS, Decoder, batch_of, config_of, rope_of

BATCH = batch_of(SEGMENTATIONS[0])
YARN = rope_of(
    variant="yarn",
    original_max_position=16,
    parameters={
        "factor": 4.0,
        "attention_factor": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    },
)
FIELDS = {"backend": "eager", "sinks": True, "bias": True, "output_bias": True, "rope": YARN}


def walk(model):
    """The generic walk: every module that can, draws its parameters."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def spoilt(model):
    """``model`` moved from meta to memory in which nothing is a number."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_built_on_meta_draws_what_a_normal_build_draws(fused):
    config = config_of(**FIELDS)
    torch.manual_seed(3)
    layer = config.layer(0).build(fused_qkv=fused)
    with torch.device("meta"):
        other = config.layer(0).build(fused_qkv=fused)
    assert all(parameter.is_meta for parameter in other.parameters())
    spoilt(other)
    torch.manual_seed(3)
    other.reset_parameters()
    for (name, want), got in zip(layer.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(got, want), name


def test_a_walk_over_a_whole_decoder_leaves_nothing_uninitialised():
    with torch.device("meta"):
        model = Decoder(config_of(**FIELDS))
    walk(spoilt(model))
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
    for module in model.modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert 0.4 * bound < module.weight.std() < 0.75 * bound
            assert module.weight.abs().max() <= bound
    for layer in model.layers:
        assert (layer.attention.q_norm.weight == 1).all()
        assert (layer.attention.k_norm.weight == 1).all()
        assert not layer.attention.sinks.logits().any()
    assert torch.isfinite(model(*BATCH)).all()


def test_rotary_tables_are_those_of_a_normal_build():
    with torch.device("meta"):
        model = Decoder(config_of(**FIELDS))
    normal = Decoder(config_of(**FIELDS))
    walk(spoilt(model))
    positions = torch.arange(60)[None]
    for layer, other in zip(model.layers, normal.layers, strict=True):
        got, want = layer.attention.rotary(positions), other.attention.rotary(positions)
        assert torch.equal(got.cos, want.cos)
        assert torch.equal(got.sin, want.sin)


def test_loading_after_to_empty_needs_nothing_but_the_state_dict():
    normal = Decoder(config_of(**FIELDS))
    with torch.device("meta"):
        model = Decoder(config_of(**FIELDS))
    spoilt(model).load_state_dict(normal.state_dict(), strict=True)
    assert torch.equal(model(*BATCH), normal(*BATCH))


def test_a_model_wide_cast_leaves_the_tables_fp32():
    model = Decoder(config_of(**FIELDS))
    want = [layer.attention.rotary(BATCH[2]) for layer in model.layers]
    for cast in (torch.bfloat16, torch.float16, torch.float32):
        for layer, tables in zip(copy.deepcopy(model).to(cast).layers, want, strict=True):
            assert torch.equal(layer.attention.rotary(BATCH[2]).cos, tables.cos)


def test_no_tensor_of_a_layer_stays_behind_when_it_moves():
    model = Decoder(config_of(**FIELDS))
    model(*BATCH)
    model.to("meta")
    left = [
        (name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.is_meta
    ]
    copies = [layer.attention.rotary._copies for layer in model.layers]
    assert left == []
    assert not any(copies)


class HubConfig(transformers.PreTrainedConfig):
    model_type = "polyattn_test"
    initializer_range = 0.02


class HubModel(transformers.PreTrainedModel):
    """A model of the hub that knows nothing of how our modules initialise."""

    config_class = HubConfig

    def __init__(self, config):
        super().__init__(config)
        self.decoder = Decoder(config_of(**FIELDS))
        self.post_init()


def test_transformers_initialises_what_a_checkpoint_lacks(tmp_path):
    model = HubModel(HubConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    lacking = ("sinks", "q_norm", "v_proj", "attention_norm")
    kept = {name: value for name, value in model.state_dict().items() if not any(part in name for part in lacking)}
    model.save_pretrained(tmp_path, state_dict=dict(kept))
    loaded = HubModel.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        if name in kept:
            assert (parameter == 7).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif "bias" in name:
            assert not parameter.any(), name
        else:
            assert 0 < parameter.std() < 0.05, name
            assert parameter.mean().abs() < 0.05, name
    normal = Decoder(config_of(**FIELDS))
    for layer, other in zip(loaded.decoder.layers, normal.layers, strict=True):
        assert torch.equal(layer.attention.rotary(BATCH[2]).cos, other.attention.rotary(BATCH[2]).cos)
