"""What messages say of a value: short whatever it contains, and how to write the number that was meant."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

import polyattn
from polyattn import AttentionConfig, AttentionSpec, ConfigError, PolyattnError, RopeSpec, read_yaml
from polyattn.messages import listed, shown

SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "v_head_dim": 16}
ROPE = {
    "schema_version": 1,
    "variant": "yarn",
    "theta": 1e4,
    "head_dim": 16,
    "rotary_dim": 16,
    "interleaved": False,
    "max_position": 64,
    "original_max_position": 16,
    "parameters": {"factor": 4.0},
    "axes": None,
}
HF = {"model_type": "llama", "rope_theta": 1e4, "head_dim": 16, "max_position_embeddings": 64}
HF_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
QK_NORM = {"position": "before", "scope": "head", "weighted": True, "eps": 1e-6}
CONFIG = {**SIZES, "attn_backend": "sdpa", "backend_options": {}, "rope": ROPE, "qk_norm": QK_NORM, "window": 4}


def bomb(shape):
    """Twelve levels of nine references each, as a few hundred bytes of YAML with aliases give them: 2.8e11 leaves."""
    value = "x"
    for _ in range(12):
        value = [value] * 9 if shape == "lists" else {str(index): value for index in range(9)}
    return value


def with_a_wrong_value(wrong):
    """Every place of a config where a user can write ``wrong``."""
    for key in (*CONFIG, "groups", "dropout", "bias", "softcap", "sinks", "scale", "serving_target", "no_such_key"):
        yield {**CONFIG, key: wrong}
    for key in ("layers", "attn_backend", "backend_options", "rope", "qk_norm", "window", "no_such_key"):
        yield {**CONFIG, "groups": [{"layers": [0], "window": 2, key: wrong}]}
    yield {**CONFIG, "groups": [wrong]}
    for key in (*QK_NORM, "no_such_key"):
        yield {**CONFIG, "qk_norm": {**QK_NORM, key: wrong}}
    for key in (*ROPE, "no_such_key"):
        yield {**CONFIG, "rope": {**ROPE, key: wrong}}
    for key in ("factor", "attention_factor", "no_such_key"):
        yield {**CONFIG, "rope": {**ROPE, "parameters": {"factor": 4.0, key: wrong}}}
    for key in ("sections", "layout", "no_such_key"):
        yield {**CONFIG, "rope": {**ROPE, "axes": {"sections": [4, 4], "layout": "chunked", key: wrong}}}
    for key in (*HF, "rope_parameters", "rope_scaling", "partial_rotary_factor", "layer_rope_theta"):
        yield {**CONFIG, "rope": {**HF, key: wrong}}
    for key in (*HF_ROPE, "mrope_section", "type", "no_such_key"):
        yield {**CONFIG, "rope": {**HF, "rope_parameters": {**HF_ROPE, key: wrong}}}
    for backend, option in (("flex_attention", "compiled"), ("flex_attention", "kernel_options"), ("fa", "provider")):
        yield {**CONFIG, "attn_backend": backend, "backend_options": {option: wrong}}
    yield {**CONFIG, "attn_backend": "flex_attention", "backend_options": {"kernel_options": {"num_warps": wrong}}}
    yield {**CONFIG, "attn_backend": "auto", "backend_options": wrong}


@pytest.mark.parametrize("shape", ["lists", "mappings"])
def test_a_value_that_contains_itself_a_thousand_million_times_is_refused_in_short(shape):
    for data in with_a_wrong_value(bomb(shape)):
        start = time.process_time()
        with pytest.raises(PolyattnError) as error:
            AttentionConfig.from_dict(data)
        assert len(str(error.value)) < 6000
        assert time.process_time() - start < 2


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "layer_types", "no_rope_layers", "sliding_window"])
def test_such_a_value_in_a_model_configuration_is_refused_in_short_too(key):
    data = {"model_type": "llama4_text", "hidden_size": 64, "num_attention_heads": 4, **HF, key: bomb("lists")}
    for read in (AttentionSpec.from_hf, RopeSpec.from_hf):
        start = time.process_time()
        try:
            read(data)
        except PolyattnError as error:
            assert len(str(error)) < 3000  # noqa: PT017 - one of the two does not look at every key
        assert time.process_time() - start < 2


def test_nested_aliases_in_a_file_of_267_bytes_give_a_short_message(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcd", "bcde", strict=True)]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join([*lines, "attn_backend: *e"]))
    data = read_yaml(path)
    with pytest.raises(ConfigError, match="attn_backend: must be the name of a backend") as error:
        AttentionConfig(attn_backend=data["attn_backend"])
    assert len(str(error.value)) < 600


def test_a_long_text_and_many_keys_are_shortened_and_counted():
    assert shown("x" * 5000) == repr("x" * 200) + "... (5000 characters)"
    assert shown(list(range(5000))).endswith("11, ... (5000 in all)]")
    assert listed(["a", "b"]) == "'a', 'b'"
    assert shown(2**200) == "an int of 201 bits"
    with pytest.raises(ConfigError) as error:
        AttentionConfig.from_dict({f"key{index}": 1 for index in range(5000)})
    assert "(5000 in all)" in str(error.value)
    assert len(str(error.value)) < 1500


def test_a_short_value_is_shown_as_python_writes_it():
    for value in (None, True, 3, 0.5, "a", b"a", [1, "a"], (1,), (), {"a": [None]}, [], {}, 2.5e-6):
        assert shown(value) == repr(value)


def test_a_value_whose_own_text_fails_is_named_by_its_type():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert shown([Broken()]) == "[a Broken]"


NUMBERS = [
    ({"qk_norm": {**QK_NORM, "eps": "1e-6"}}, "qk_norm.eps must be a small positive number .*'1e-6'", "1.0e-6"),
    ({"rope": {**ROPE, "theta": "1e4"}}, "theta must be .*'1e4'", "1.0e+4"),
    ({"rope": {**ROPE, "parameters": {"factor": "4.5e0"}}}, "factor.* must be .*'4.5e0'", "4.5e+0"),
    ({"rope": {**ROPE, "parameters": {"factor": ["1e0"]}}}, "factor.* must be .*'1e0'", "1.0e+0"),
    ({"rope": {**HF, "rope_theta": "1e6"}}, "rope_theta must be .*'1e6'", "1.0e+6"),
    ({"window": "1e3"}, "window.* must be .*'1e3'", "1.0e+3"),
    ({"dropout": "1E-1"}, "dropout.* must be .*'1E-1'", "1.0e-1"),
    ({"softcap": "5e1"}, "softcap.* must be .*'5e1'", "5.0e+1"),
    ({"scale": "-1e-1"}, "scale.* must be .*'-1e-1'", "-1.0e-1"),
    ({"hidden_size": "1e3"}, "hidden_size.* must be .*'1e3'", "1.0e+3"),
    ({"attn_backend": "flex_attention", "backend_options": {"compile_limit": "1e2"}}, "compile_limit.*'1e2'", "1.0e+2"),
]


@pytest.mark.parametrize(("data", "said", "written"), NUMBERS)
def test_a_number_that_yaml_reads_as_text_comes_with_the_way_to_write_it(data, said, written):
    with pytest.raises(PolyattnError, match=f"{said} \\(text: YAML reads ") as error:
        AttentionConfig.from_dict({**SIZES, **data})
    assert f"YAML reads {written} as a number" in str(error.value)


def test_what_the_hint_says_is_what_yaml_reads(tmp_path):
    path = tmp_path / "numbers.yaml"
    for given in ("1e-6", "1e4", "1.5e3", "-2E5", "1.e+2"):
        written = shown(given).partition("YAML reads ")[2].partition(" as")[0]
        path.write_text(f"number: {written}")
        assert read_yaml(path) == {"number": float(given)}


def test_every_message_of_core_shows_values_in_short():
    """No ``!r`` and no ``repr`` but in ``_numbers`` and where an object writes itself: they have no bound."""
    root = Path(polyattn.__file__).parent
    unbounded = []
    for path in root.rglob("*.py"):
        if path.name == "messages.py" or path.is_relative_to(root / "testing"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        own = [node for node in own if node.name in {"__repr__", "extra_repr", "__getattr__"}]
        allowed = {id(inner) for node in own for inner in ast.walk(node)}
        unbounded += [
            f"{path.relative_to(root)}:{node.lineno}: write shown(...) instead"
            for node in ast.walk(tree)
            if id(node) not in allowed
            and (
                (isinstance(node, ast.FormattedValue) and node.conversion == ord("r"))
                or (isinstance(node, ast.Name) and node.id == "repr")
            )
        ]
    assert not unbounded, "\n".join(unbounded)
