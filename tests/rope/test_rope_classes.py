"""Every rotary class of the installed transformers: built, read by us, and compared in values, pairing and rotation."""

from __future__ import annotations

import importlib
import importlib.util
import json

import pytest
import torch

pytest.importorskip("transformers")

import rope_classes
from polyattn import RopeConfigError, RopeSpec, RotaryEmbedding, apply_rotary
from polyattn_readers.model_classes import class_theta, classes, known_classes
from rope_golden import DATA

#: The version that the lists were written for. On others, an unlisted class may be refused, but never read otherwise.
LISTED = (5, 19)
MODELS = {model["model"]: model for model in json.loads((DATA / "configs.json").read_text(encoding="utf-8"))["models"]}
#: Recorded models that are not compared with their class, and why.
NOT_COMPARED = {"Phi-3.5-MoE": "transformers takes the short list of factors on both sides of the switch"}


@pytest.mark.slow
def test_every_class_with_a_rope_is_read_right_or_refused():
    """From its defaults, per layer type, on three different axes. What is not compared is listed, and refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    rotary = rope_classes.rotary_classes()
    configs = rope_classes.config_classes(rotary)
    compared, wrong, refused = 0, {}, {}
    for name, config in ((name, config) for name, kinds in configs.items() for config in kinds):
        if rope_classes.version() < LISTED and name in rope_classes.BEFORE:
            continue
        try:
            found = rope_classes.outcomes(*rotary[name], config)
        except ImportError:
            assert importlib.util.find_spec(rope_classes.PACKAGES[name]) is None
            continue
        for layer_type, difference in found.items():
            if isinstance(difference, RopeConfigError):
                refused[config.__name__ if config.__name__ in rope_classes.WITHOUT_CLASS else name] = str(difference)
            elif difference:
                wrong[f"{name}, {config.__name__}, {layer_type}"] = difference
            else:
                compared += 1
    assert not wrong
    with_rope = {kind for kind in map(CONFIG_MAPPING.__getitem__, CONFIG_MAPPING.keys()) if rope_classes.has_rope(kind)}
    for kind in with_rope - {kind for kinds in configs.values() for kind in kinds}:
        if rope_classes.version() < LISTED and kind.__name__ in rope_classes.BEFORE:
            continue
        refused[kind.__name__] = refusal(kind)
    for name, (model_type, _, _) in rope_classes.ELSEWHERE.items():
        if name in rotary and model_type is not None:
            refused[name] = refusal(CONFIG_MAPPING[model_type])
    listed = {name: text for name, (_, text, _) in rope_classes.ELSEWHERE.items() if text}
    listed |= rope_classes.REFUSED | rope_classes.WITHOUT_CLASS
    assert {name: text for name, text in refused.items() if listed.get(name, "") not in text} == {}
    if rope_classes.version() == LISTED:
        assert set(refused) == set(listed)
        assert {name for name in rotary if not configs.get(name)} == set(rope_classes.ELSEWHERE)
        assert compared >= 186


def refusal(kind):
    config = rope_classes.built(kind).to_dict()
    with pytest.raises(RopeConfigError) as caught:
        RopeSpec.from_hf(config, max_position=config.get("max_position_embeddings") or 64)
    return str(caught.value)


def test_the_recorded_configs_are_read_as_their_classes_compute():
    """In both styles; the dictionary means what the object means that transformers makes of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    users, wrong = {}, {}
    for name, model in MODELS.items():
        if rope_classes.version() != LISTED and model["model_type"] not in CONFIG_MAPPING:
            continue
        kind = CONFIG_MAPPING[model["model_type"]]
        if kind not in users:
            rotary = rope_classes.rotary_classes(kind.__module__.split(".")[2])
            configs = rope_classes.config_classes(rotary)
            users |= {kind: rotary[name] for name, kinds in configs.items() for kind in kinds}
        if rope_classes.version() < LISTED and (
            kind.__name__ in rope_classes.BEFORE or users[kind][0].__name__ in rope_classes.BEFORE
        ):
            continue
        sizes = {key: value for key, value in model["dimensions"].items() if value != "per-layer"}
        for style in ({"v4", "v5"} & set(model)) if name not in NOT_COMPARED else ():
            config = rope_classes.built(kind, **json.loads(json.dumps({**sizes, **model[style]})))
            for layer_type in rope_classes.layer_types(config):
                spec = RopeSpec.from_hf(config, layer_type=layer_type)
                if "per-layer" not in model["dimensions"].values():
                    raw = {"model_type": model["model_type"], **sizes, **model[style]}
                    assert RopeSpec.from_hf(raw, layer_type=layer_type) == spec, (name, style)
                if difference := rope_classes.difference(*users[kind], config, layer_type):
                    wrong[f"{name}, {style}, {layer_type}"] = difference
    assert not wrong


@pytest.mark.slow
def test_the_facts_of_each_class_are_those_of_its_configuration():
    """Base, a part that rotates, ropes by layer and scaling: what the class takes when nothing is said."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    wrong = []
    for name in sorted(known_classes() & {*CONFIG_MAPPING.keys()}):
        try:
            config = rope_classes.built(CONFIG_MAPPING[name])
        except ImportError:
            continue
        rope = getattr(config, "rope_parameters", None)
        if not rope or CONFIG_MAPPING[name].__name__ in rope_classes.BUILD:
            continue
        nested = rope_classes.layer_types(config) != [None]
        if class_theta({"model_type": name}) not in (None, None if nested else rope["rope_theta"]):
            wrong.append(f"{name}: theta {rope}")
        if nested != (name in classes()["by_layer"]) and name != "olmo3":  # whose older files have one base for all
            wrong.append(f"{name}: by_layer {rope}")
        if (not nested and rope["rope_type"] != "default") != (name in classes()["scaled"]):
            wrong.append(f"{name}: scaled {rope}")
        a_part = not nested and (rope.get("partial_rotary_factor") or 1.0) != 1.0
        if a_part and name not in (*classes()["partial_required"], *classes()["keys"]["qk_rope_head_dim"]):
            wrong.append(f"{name}: partial_required {rope}")
    assert not wrong


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_classes_without_a_rotary_module_are_read_by_their_own_names_of_sizes(name):
    """GPT-J and CodeGen keep ``rotary_dim`` and ``n_embd``, and fix the base in their code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = rope_classes.built(CONFIG_MAPPING[name], n_embd=64, n_head=4, rotary_dim=8, n_positions=32)
    spec = RopeSpec.from_hf(config)
    assert (spec.head_dim, spec.rotary_dim, spec.max_position, spec.interleaved) == (16, 8, 32, True)
    positions, q = torch.tensor([[0, 3, 31]]), torch.randn(1, 4, 3, 16)
    sin, cos = module.create_sinusoidal_positions(32, 8)[positions].chunk(2, -1)
    theirs = module.apply_rotary_pos_emb(q[..., :8].transpose(1, 2), sin, cos).transpose(1, 2)
    ours, _ = apply_rotary(q, q, RotaryEmbedding(spec)(positions), interleaved=True)
    assert torch.allclose(ours, torch.cat((theirs, q[..., 8:]), -1), atol=2e-5)
    with pytest.raises(RopeConfigError, match=r"rope_theta is 500000.0, but this class has 10000.0 and does not"):
        RopeSpec.from_hf({**config.to_dict(), "rope_theta": 5e5})
    with pytest.raises(RopeConfigError, match="'rotary_dim' is missing"):
        RopeSpec.from_hf({**config.to_dict(), "rotary_dim": None})
