"""Choosing a backend for a model of transformers, and every wrong way to do it."""

from __future__ import annotations

import copy
import importlib.util
import logging
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import polyattn_transformers
from polyattn import BackendBase, ConfigError, UnknownBackendError, UnsupportedAttentionError, backends
from polyattn_transformers._fitness import attends
from polyattn_transformers._versions import check_version
from tiny_configs import tiny_config
from tiny_dists import TinyDist
from tiny_models import ZOO, config_of, ids, model_of
from versions import of_transformers


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


def implementations_of(model):
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


def test_register_offers_every_installed_backend_and_auto():
    names = polyattn_transformers.register()
    assert set(names) == {f"polyattn_{name}" for name in (*backends.names(), "auto")}
    assert all(name in AttentionInterface.valid_keys(AttentionInterface()) for name in names)
    assert all(name in AttentionMaskInterface.valid_keys(AttentionMaskInterface()) for name in names)


def test_register_twice_is_harmless():
    before = PreTrainedModel.get_correct_attn_implementation
    assert polyattn_transformers.register() == polyattn_transformers.register()
    assert PreTrainedModel.get_correct_attn_implementation is before
    assert model_of("llama", "sdpa").config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["polyattn_eager", "polyattn_sdpa", "polyattn_auto"])
def test_a_model_is_built_and_loaded_by_name(name, tmp_path):
    model = AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation=name)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert implementations_of(again) == {name}
    assert "polyattn" not in (tmp_path / "config.json").read_text()
    with torch.no_grad():
        assert torch.equal(model.eval()(ids()).logits, again.eval()(ids()).logits)


def test_names_are_ours_to_judge():
    # transformers refuses whatever contains "sdpa" for a model that its own sdpa cannot serve.
    with pytest.raises(ValueError, match="does not support an attention implementation through"):
        model_of("gpt_oss", "sdpa")
    assert implementations_of(model_of("gpt_oss", "polyattn_sdpa")) == {"polyattn_sdpa"}


@pytest.mark.parametrize(
    "choose",
    [
        lambda: model_of("llama", "polyattn_sdpaa"),
        lambda: model_of("llama").set_attn_implementation("polyattn_sdpaa"),
        lambda: polyattn_transformers.use(model_of("llama"), "sdpaa"),
    ],
)
def test_an_unknown_backend_fails_when_the_model_is_configured(choose):
    with pytest.raises(UnknownBackendError) as error:
        choose()
    assert "attn_implementation 'polyattn_sdpaa'" in str(error.value)
    assert "polyattn_eager, polyattn_fa, polyattn_flex_attention, polyattn_sdpa, polyattn_auto" in str(error.value)


@pytest.mark.parametrize("name", ZOO)
def test_use_switches_every_part_of_a_model(name):
    model = model_of(name)
    assert polyattn_transformers.use(model, "sdpa") is model
    assert implementations_of(model) == {"polyattn_sdpa"}
    polyattn_transformers.use(model, "polyattn_eager")
    assert implementations_of(model) == {"polyattn_eager"}


def test_use_reaches_what_transformers_leaves_behind():
    model = model_of("t5")
    model.set_attn_implementation("polyattn_sdpa")
    assert model.encoder.config._attn_implementation == "eager"  # without a word
    polyattn_transformers.use(model, "sdpa")
    assert model.encoder.config._attn_implementation == model.decoder.config._attn_implementation == "polyattn_sdpa"


def test_use_works_through_wrappers():
    wrapped = nn.Sequential(model_of("llama"))
    polyattn_transformers.use(wrapped, "eager")
    assert implementations_of(wrapped) == {"polyattn_eager"}


def hybrid():
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).eval()


def test_each_type_of_layer_runs_on_the_backend_that_was_named_for_it(monkeypatch):
    ran = []
    for name in ("eager", "sdpa"):
        kind = type(backends.get(name))

        def watched(self, *tensors, attend=kind.attend, name=name, **rest):
            ran.append(name)
            return attend(self, *tensors, **rest)

        monkeypatch.setattr(kind, "attend", watched)
    model, tokens = hybrid(), torch.arange(12)[None]
    want = polyattn_transformers.use(model, "eager")(tokens).logits
    ran.clear()
    polyattn_transformers.use(model, {"sliding_attention": "sdpa", "full_attention": "polyattn_eager"})
    torch.testing.assert_close(model(tokens).logits, want)
    assert ran == ["sdpa", "eager"] * 2
    assert implementations_of(model) == {"polyattn_by_layer[sliding_attention=sdpa, full_attention=eager]"}
    torch.testing.assert_close(copy.deepcopy(model)(tokens).logits, want)
    generated = model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(
        generated, polyattn_transformers.use(model, "sdpa").generate(tokens, max_new_tokens=4, do_sample=False)
    )


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"sliding_attention": "sdpa"}, "which has sliding_attention, full_attention, got sliding_attention"),
        ({}, "which has sliding_attention, full_attention, got none"),
        ({"sliding_attention": "sdpa", "full_attention": "eager", "chunked_attention": "sdpa"}, "chunked_attention"),
        ({"sliding_attention": 3, "full_attention": "eager"}, "or a mapping with a name for each type of layer"),
    ],
)
def test_types_of_layers_that_the_model_has_otherwise_are_refused(names, text):
    model = hybrid()
    before = implementations_of(model)
    with pytest.raises(ConfigError, match=text):
        polyattn_transformers.use(model, names)
    assert implementations_of(model) == before


def test_layers_without_a_type_take_one_backend():
    model = LlamaForCausalLM(tiny_config(LlamaConfig))
    with pytest.raises(ConfigError, match="which has layers without a type, got full_attention"):
        polyattn_transformers.use(model, {"full_attention": "sdpa"})
    with pytest.raises(ConfigError, match="options must be None beside a backend for each type of layer"):
        polyattn_transformers.use(model, {"full_attention": "sdpa"}, {"upcast_backward": True})


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
def test_use_takes_options_of_the_backend():
    model = polyattn_transformers.use(model_of("llama"), "flex_attention", {"compiled": False})
    assert implementations_of(model) == {"polyattn_flex_attention[compiled=False]"}
    model(ids()).logits.sum().backward()  # which the compiled kernel cannot do on the CPU
    twin = LlamaForCausalLM(copy.deepcopy(model.config))
    assert implementations_of(twin) == {"polyattn_flex_attention[compiled=False]"}
    with pytest.raises(ConfigError, match="unknown option 'speed'"):
        polyattn_transformers.use(model, "flex_attention", {"speed": 3})


@pytest.mark.parametrize(
    ("kind", "config", "arguments", "layer"),
    [
        ("BloomForCausalLM", "BloomConfig", {"n_layer": 1}, r"transformer.h.0.self_attention \(BloomAttention\)"),
        ("XLNetLMHeadModel", "XLNetConfig", {"n_layer": 1, "d_inner": 8}, r"transformer.layer.0.rel_attn"),
    ],
)
def test_a_model_that_attends_by_itself_is_refused_and_left_alone(kind, config, arguments, layer):
    settings = getattr(transformers, config)(vocab_size=9, d_model=8, n_head=2, hidden_size=8, **arguments)
    model = getattr(transformers, kind)(settings)
    before = implementations_of(model)
    with pytest.raises(ConfigError, match=rf"attend without transformers' attention interface: {layer}"):
        polyattn_transformers.use(model, "sdpa")
    assert implementations_of(model) == before
    settings._attn_implementation = "polyattn_sdpa"
    with pytest.raises(ConfigError, match=rf"'polyattn_sdpa' cannot serve {kind}, which attends without transformers'"):
        getattr(transformers, kind)(settings)


def small(family, **changes):
    found = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
        "intermediate_size": 8,
    }
    return found(**{key: value for key, value in sizes.items() if hasattr(found, key)} | changes)


@pytest.mark.parametrize(
    ("kind", "config", "text"),
    [
        (
            "DeepseekV32ForCausalLM",
            "DeepseekV32",
            "chooses keys for each query, and the indexer computes on a mask of num",
        ),
        ("GlmMoeDsaForCausalLM", "GlmMoeDsa", "chooses keys for each query, and the indexer"),
        ("DeepseekV4ForCausalLM", "DeepseekV4", "chooses keys for each query, and the indexer"),
        (
            "DogeForCausalLM",
            "Doge",
            "adds a mask of its own, made from the values, to a mask of numbers; choose .* 'eager'",
        ),
        (
            "BigBirdPegasusModel",
            "BigBirdPegasus",
            r"attends in random blocks by itself \(set config.attention_type = 'or",
        ),
        ("GitForCausalLM", "Git", "chooses a class for its attention by name and has 'eager' only"),
        (
            "FalconForCausalLM",
            "Falcon",
            r"choose transformers' own attn_implementation 'eager' or 'sdpa' or 'flash_attention_2'",
        ),
        ("GPTNeoForCausalLM", "GPTNeo", r"own attn_implementation 'eager' or 'flash_attention_2'"),
        ("SamVisionModel", "SamVision", "chooses a class for its attention by name and has 'eager', 'sdpa' only"),
        ("Data2VecVisionModel", "Data2VecVision", "own attn_implementation 'eager' or 'sdpa'"),
        ("MambaForCausalLM", "Mamba", "has no attention layers; leave attn_implementation out"),
        ("FNetForMaskedLM", "FNet", "has no attention layers; leave attn_implementation out"),
        (
            "GraniteSpeechForConditionalGeneration",
            "GraniteSpeech",
            r"attends without .* or polyattn for a part that can: attn_implementation={'text_config': ...}, where",
        ),
    ],
)
def test_a_model_that_cannot_run_is_refused_when_it_is_configured_with_what_can_be_done(kind, config, text):
    with torch.device("meta"), pytest.raises(ConfigError, match=rf"cannot serve {kind}, which .*{text}"):
        getattr(transformers, kind)._from_config(small(config), attn_implementation="polyattn_sdpa")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "LongT5ForConditionalGeneration",
            r"interface(: .*block.0.layer.0.LocalSelfAttention \(LongT5LocalAttention\)|; choose)",
        ),
        ("PegasusXForConditionalGeneration", r"interface: .*layers.0.self_attn \(PegasusXGlobalLocalAttention\), "),
        (
            "EvollaForProteinText2Text",
            r"Attention\), .* and \d+ more; of a .* attn_implementation=\{'text_config': 'polyattn_sdpa'\}, or",
        ),
        ("T5Gemma2ForConditionalGeneration", "joins the masks of its encoder and its decoder into one of numbers"),
        ("Gemma4AssistantForCausalLM", "turns its mask of numbers round"),
        ("Gemma4UnifiedAssistantForCausalLM", "turns its mask of numbers round"),
        ("LightGlueForKeypointMatching", "turns its mask of numbers round; choose transformers' own"),
        ("MiniMaxM3VLForCausalLM", "chooses blocks of keys for each query by an indexer"),
    ],
)
def test_a_configuration_and_use_refuse_the_same_models_for_the_same_reason(kind, text):
    build = getattr(transformers, kind)._from_config
    config = tiny_config(getattr(transformers, kind).config_class)
    with torch.device("meta"):
        with pytest.raises(ConfigError, match=text):
            build(copy.deepcopy(config), attn_implementation="polyattn_sdpa")
        model = build(config, attn_implementation="eager")
    before = implementations_of(model)
    with pytest.raises(ConfigError, match=text):
        polyattn_transformers.use(model, "sdpa")
    assert implementations_of(model) == before


def test_the_layers_of_a_loaded_model_are_looked_at_when_it_is_switched_by_transformers():
    config = tiny_config(transformers.PegasusXConfig)
    with torch.device("meta"):
        model = transformers.PegasusXForConditionalGeneration._from_config(config, attn_implementation="eager")
    with pytest.raises(ConfigError, match="PegasusXForConditionalGeneration cannot run on polyattn_sdpa, because"):
        model.set_attn_implementation("polyattn_sdpa")
    decoder = model.model.decoder
    assert implementations_of(polyattn_transformers.use(decoder, "sdpa")) == {"polyattn_sdpa"}


def test_what_belongs_to_an_attention_and_does_not_attend_is_no_reason_to_refuse():
    names = ("MemoryAttentionMLP", "AttentionPooling", "AttentionOutput", "LocalAttention")
    assert [name for name in names if attends(type(name, (nn.Module,), {}))] == ["LocalAttention"]


@pytest.mark.parametrize("kind", ["AriaForConditionalGeneration", "AyaVisionForConditionalGeneration"])
def test_torchs_own_attention_in_a_projector_or_a_head_is_no_reason_to_refuse(kind):
    build = getattr(transformers, kind)._from_config
    config = tiny_config(getattr(transformers, kind).config_class)
    with torch.device("meta"):
        build(copy.deepcopy(config), attn_implementation="polyattn_sdpa")
        model = build(config, attn_implementation="eager")
    assert implementations_of(polyattn_transformers.use(model, "sdpa")) == {"polyattn_sdpa"}


def test_the_language_model_of_a_model_that_cannot_run_is_switched_alone():
    encoder = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "dim_head": 8, "input_dim": 8, "output_dim": 8}
    text = {
        "model_type": "granite",
        "vocab_size": 9,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.GraniteSpeechConfig(
        text_config=text | {"num_key_value_heads": 1, "intermediate_size": 8, "pad_token_id": 0},
        encoder_config=encoder,
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    )
    choice = {"text_config": "polyattn_sdpa"}
    with torch.device("meta"):
        model = transformers.GraniteSpeechForConditionalGeneration._from_config(config, attn_implementation=choice)
    assert model.model.language_model.config._attn_implementation == "polyattn_sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_of_another_name_and_torchs_own_are_no_reason_to_refuse():
    with torch.device("meta"):
        kimi = of_transformers("KimiLinearForCausalLM")(
            small("KimiLinear", layer_types=["full_attention"], pad_token_id=0)
        )
    assert implementations_of(polyattn_transformers.use(kimi, "sdpa")) == {"polyattn_sdpa"}
    vision = transformers.SiglipVisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        tower = transformers.SiglipVisionModel(vision)  # its head is torch's MultiheadAttention
    assert implementations_of(polyattn_transformers.use(tower, "sdpa")) == {"polyattn_sdpa"}


def mamba():
    config = transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
    return transformers.MambaForCausalLM(config)


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), mamba])
def test_a_model_without_attention_is_refused(make):
    with pytest.raises(ConfigError, match="must be or contain a transformers model with attention layers"):
        polyattn_transformers.use(make(), "sdpa")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("m", "sdpa"), "model must be or contain a transformers model, got str; pass the model itself"),
        ((None, "sdpa"), "model must be or contain a transformers model, got NoneType"),
        ((nn.Linear(1, 1), None), "name must be the name of a backend, got None; installed: .*sdpa.*auto"),
        ((nn.Linear(1, 1), 3), "name must be the name of a backend, got 3"),
        ((nn.Linear(1, 1), "sdpa", 3), "options must map names of the backend's options to values, got 3; pass a dict"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(arguments, text):
    with pytest.raises(ConfigError, match=text):
        polyattn_transformers.use(*arguments)


def test_attention_weights_are_refused_by_name():
    model = model_of("llama", "polyattn_eager")
    with pytest.raises(UnsupportedAttentionError, match="transformers' own attn_implementation='eager' returns them"):
        model(ids(), output_attentions=True)
    asking = model_of("llama", output_attentions=True)
    with pytest.raises(ConfigError, match="output_attentions=True, which no polyattn backend can serve"):
        polyattn_transformers.use(asking, "sdpa")
    with pytest.raises(StrictDataclassClassValidationError, match="set it to 'eager'"):
        LlamaConfig(output_attentions=True, attn_implementation="polyattn_sdpa")


@pytest.mark.parametrize("name", [name for name in ZOO if name != "qwen2_vl"])
def test_no_model_loses_a_request_for_attention_weights(name):
    model = model_of(name, "polyattn_eager")
    with pytest.raises(UnsupportedAttentionError, match="output_attentions=True"):
        model(**ZOO[name].inputs(), output_attentions=True)


def test_importing_registers_nothing_and_a_strangers_backend_is_a_name_like_any_other(run_python, tmp_path):
    module = """
        from torch.nn.functional import scaled_dot_product_attention
        from polyattn import AttentionResult, BackendBase

        class Backend(BackendBase):
            name = "acme"
            abilities = frozenset({"float32", "full", "causal", "gqa", "grad"})

            def plan(self, layout, request):
                return layout.to_dense(request.device)

            def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
                return AttentionResult(
                    scaled_dot_product_attention(
                        q, k, v, attn_mask=prepared.state, scale=prepared.request.scale, enable_gqa=True
                    )
                )
    """
    dist = TinyDist("acme", backends={"acme": "acme:Backend"}, modules={"acme.py": textwrap.dedent(module)})
    code = """
        import sys, polyattn_transformers
        from transformers import AttentionInterface

        assert not [name for name in AttentionInterface._global_mapping if name.startswith("polyattn_")]
        polyattn_transformers.register()
        assert {"polyattn_sdpa", "polyattn_acme"} <= AttentionInterface._global_mapping.keys()
        assert not sys.modules.keys() & {"polyattn_sdpa", "polyattn_flex", "polyattn_fa2", "acme"}

        import torch
        from polyattn import AttentionConfig
        from tiny_models import ids, model_of

        assert AttentionConfig.from_dict({"attn_backend": "acme"}).layer(0).backend.name == "acme"
        logits = [model_of("llama", name)(ids()).logits for name in ("polyattn_acme", "eager")]
        torch.testing.assert_close(*logits)
    """
    support = Path(__file__).parents[1] / "support"
    run_python(textwrap.dedent(code), path=[dist.unpack(tmp_path / "site"), support])


def test_a_backend_registered_in_code_is_selectable(monkeypatch):
    class Acme(BackendBase):
        name = "acme"

        def plan(self, layout, request):
            return None

    with backends.override("acme", Acme()):
        assert "polyattn_acme" in polyattn_transformers.register()
        model = model_of("llama", "polyattn_acme")
        with pytest.raises(UnsupportedAttentionError, match="backend 'acme' cannot do this attention"):
            model(ids())
    assert "polyattn_acme" not in polyattn_transformers.register()


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_backend_without_its_kernel_says_so_when_the_model_is_configured():
    model = model_of("llama")
    for choose in (
        lambda: polyattn_transformers.use(model, "fa"),
        lambda: model_of("llama", "polyattn_fa"),
    ):
        with pytest.raises(UnsupportedAttentionError, match="no installed package flash_attn") as refusal:
            choose()
        assert {reason.feature for reason in refusal.value.reasons} == {"kernel"}
    assert implementations_of(model) == {"eager"}


def test_no_warning_says_that_a_submodel_was_set_in_the_dark(caplog):
    with caplog.at_level(logging.WARNING):
        polyattn_transformers.use(model_of("qwen2_vl"), "sdpa")
    assert caplog.records == []


def test_an_older_transformers_is_refused():
    with pytest.raises(ConfigError, match=r"transformers must be one of 5\.\d+ to 5\.\d+, got 4\.57\.1, whose masks"):
        check_version("4.57.1")


def test_a_newer_transformers_is_refused_unless_allowed():
    with pytest.raises(ConfigError, match=r"got 5\.99\.0\.dev0, which polyattn-transformers was not tested with"):
        check_version("5.99.0.dev0")
    check_version("5.99.0", allow_untested=True)
    check_version(transformers.__version__)


def test_an_older_transformers_is_refused_at_import(run_python):
    code = """
    import transformers
    transformers.__version__ = "5.8.1"
    import polyattn_transformers
    """
    assert "ConfigError: transformers must be one of 5.12 to 5.19" in run_python(textwrap.dedent(code), status=1).stderr
