"""All rotary classes of the installed transformers: what builds them, how they rotate, and which cannot be compared."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import warnings
from pathlib import Path

import torch

from polyattn import RopeConfigError, RopeSpec, RotaryEmbedding, apply_rotary

#: Values that published models have, for configuration classes whose own defaults contradict each other.
BUILD = {
    "Glm4MoeConfig": {"head_dim": 128},
    "Glm4vMoeTextConfig": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "Glm4vTextConfig": {"partial_rotary_factor": 0.5},
    "GlmImageTextConfig": {"partial_rotary_factor": 0.5},
    "Qwen3OmniMoeTextConfig": {"num_attention_heads": 32, "head_dim": 128},
    "Qwen4ExpTextConfig": {"partial_rotary_factor": 0.25},
    "GraniteMoeHybridConfig": {"position_embedding_type": "rope"},
    "HunYuanVLTextConfig": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [16, 16, 16, 16]}},
    "LagunaConfig": {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    "MellumConfig": {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    "ZayaConfig": {"layer_types": ["hybrid", "hybrid_sliding"], "num_hidden_layers": 2, "sliding_window": 8},
    "MiniMaxM3VLTextConfig": {"partial_rotary_factor": 0.5},
    "Qwen3OmniMoeTalkerTextConfig": {"head_dim": 128},
    "EsmConfig": {"position_embedding_type": "rotary", "pad_token_id": 0},
    "SaProtConfig": {"position_embedding_type": "rotary"},
    "Zamba2Config": {"use_mem_rope": True},
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
}
#: What the caller must say of classes whose configuration does not.
ARGUMENTS = {
    "RecurrentGemmaConfig": {"max_position": 8192},
    "MoonshineConfig": {"head_dim": 36},
    "Qwen3OmniMoeCode2WavConfig": {"interleaved": False},
    "SaProtConfig": {"interleaved": False},
}

_GRID = "its positions lie on a grid"
#: Rotary classes that :meth:`RopeSpec.from_hf` refuses, with the words of the refusal.
REFUSED = {
    "Qwen2_5OmniDiT": "only the first head of a layer rotates",
    "MusicFlamingoRotaryEmbedding": "its angles come from time stamps",
    "CohereCompassRotaryEmbedding": "its lanes do not stand in the order of their frequencies",
    "HunYuanVLRotaryEmbedding": "mrope_section is not supported: this class cuts channels",
    "NanoChatRotaryEmbedding": "it turns in the opposite direction",
    **dict.fromkeys(
        re.findall(
            r"\w+",
            """
        CohereCompassVision EdgeTamVideoVision EfficientLoFTR EomtDinov3 Ernie4_5_VLMoeVision Exaone4_5_Vision
        Gemma4Vision Glm4vMoeVision Glm4vVision Glm5NextVision GlmOcrVision Kimi_K25Vision Llama4Vision MLCD
        MiniMaxM3VLVision MuseGlimmerVision PaddleOCRVision PixtralVision Qwen2VLVision Qwen2_5OmniVision
        Qwen2_5_VLVision Qwen3OmniMoeVision Qwen3VLMoeVision Qwen3VLVision Qwen3_5MoeVision Qwen3_5Vision Qwen4ExpVision
        Sam2VideoVision Sam3TrackerVideoVision Sam3ViT Step3p7Vision VideoLlama3Vision
        """,
        ),
        _GRID,
    ),
}
REFUSED = {name if name.endswith("Embedding") else f"{name}RotaryEmbedding": why for name, why in REFUSED.items()}
#: Rotary classes that no configuration with a rope builds: what their own configuration is refused for, and why.
ELSEWHERE = {
    "ClvpRotaryPositionalEmbedding": ("clvp_encoder", "use_rotary_embedding", "angles of its own, in the module"),
    "EsmFold2RotaryEmbedding": (None, "", "turns by places in space; the part that builds it has no model_type"),
    "SeamlessM4TConformerRotaryPositionalEmbedding": (
        "seamless_m4t",
        "rotary_embedding_base",
        "a speech encoder's own",
    ),
    "Wav2Vec2BertRotaryPositionalEmbedding": ("wav2vec2-bert", "rotary_embedding_base", "a speech encoder's own"),
    "Wav2Vec2ConformerRotaryPositionalEmbedding": ("wav2vec2-conformer", "rotary_embedding_base", "the same"),
}
#: Configuration classes with a rope that builds no rotary class of their own, and what refuses them.
WITHOUT_CLASS = {
    "BltConfig": "'head_dim' is missing",  # its parts have the sizes and are compared
    "DINOv3ViTConfig": _GRID,
    "FuyuConfig": "it does not tell how channels pair",  # its text part is Persimmon's, which is compared
    "Sapiens2Config": _GRID,
}
_TABLES = "its tables still have the three axes, which its own function of rotation joins"
#: Classes of configurations and of rotations that older versions have otherwise, so that there is nothing to compare.
BEFORE = {
    "Ernie4_5_VLMoeTextConfig": "its rotary class is not annotated with it",
    "Olmo3Config": "it has one rope for layers of both types",
    "BambaRotaryEmbedding": "it rotates whole heads, whatever part the configuration says",
    "PaddleOCRRotaryEmbedding": _TABLES,
    "Qwen2VLRotaryEmbedding": _TABLES,
    "Qwen2_5OmniRotaryEmbedding": _TABLES,
    "Qwen2_5_VLRotaryEmbedding": _TABLES,
}
#: Rotary classes whose configuration needs a package that may not be installed.
PACKAGES = {"PeAudioVideoEncoderRotaryEmbedding": "timm", "PeVideoEncoderRotaryEmbedding": "timm"}


def version():
    """The first two numbers of the version of transformers."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2]))


def rotary_classes(models="*"):
    """Every class of transformers with ``Rotary`` in its name, by name, with its module.

    Args:
        models: of which packages, a pattern.
    """
    import transformers

    root = Path(transformers.__file__).parent / "models"
    found = {}
    for path in sorted(root.glob(f"{models}/modeling_*.py")):
        names = re.findall(r"^class (\w*Rotary\w*)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        if names:
            module = _imported(f"transformers.models.{path.parent.name}.{path.stem}")
            found |= {name: (getattr(module, name), module) for name in names}
    return found


def _imported(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def built(config_class, **values):
    """A configuration; what transformers logs of it is nobody's business here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return config_class(**{**BUILD.get(config_class.__name__, {}), **values})
    finally:
        logging.disable(before)


def config_classes(classes):
    """The configuration classes that build each rotary class: the annotated one, or parts of it with a rope."""
    annotated = {name: _annotation(rotary) for name, (rotary, _) in classes.items()}
    own = {config for config in annotated.values() if config is not None and has_rope(config)}
    modules = [module for _, module in classes.values()]
    return {
        name: [config] * (config in own)
        + [
            part
            for part in _parts(config)
            if has_rope(part) and part not in own and (config not in own or modules.count(classes[name][1]) == 1)
        ]
        for name, config in annotated.items()
        if config is not None
    }


def _annotation(rotary):
    if rotary.__name__ == "Qwen3OmniMoeTalkerRotaryEmbedding":  # it inherits the annotation of another part
        return _imported("transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe").Qwen3OmniMoeTalkerTextConfig
    config = list(inspect.signature(rotary.__init__).parameters.values())[1].annotation
    return None if config is inspect.Parameter.empty else config


def has_rope(config):
    """Whether configurations of this class say something of a rope."""
    fields = getattr(config, "__dataclass_fields__", {})
    return "rope_parameters" in fields or "rope_theta" in fields


def _parts(config):
    """The configuration classes of the same model."""
    parts = vars(importlib.import_module(config.__module__)).values()
    return [part for part in parts if isinstance(part, type) and part.__module__ == config.__module__]


def layer_types(config):
    """The layer types that have a rope of their own, or ``None`` alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    return nested or [None]


def difference(rotary, module, config, layer_type, **arguments):
    """How our reading of a configuration differs from the class, in words; empty when it does not.

    Cosines, sines and rotated queries and keys are compared, at three different axes where there are axes.
    """
    spec = RopeSpec.from_hf(config, layer_type=layer_type, **arguments)
    far = spec.max_position - 1 if spec.variant == "longrope" else 1023
    if spec.variant == "dynamic" and spec.parameters["alpha"] is None:
        far = int(spec.original_max_position * spec.parameters["factor"]) - 1  # where both mean the same length
    positions = torch.tensor([[0, 1, 7, 100, far]])
    axes = torch.stack((positions, 2 * positions + 1, positions.flip(-1)))  # three that differ
    theirs = _called(rotary(config), axes if spec.axes is not None else positions, layer_type, axes)
    ours = RotaryEmbedding(spec)(axes if spec.axes is not None else positions)
    cos, sin = (theirs.real, theirs.imag) if isinstance(theirs, torch.Tensor) else theirs
    if cos.shape[-1] == spec.rotary_dim:
        half = slice(0, spec.rotary_dim // 2)
        lanes = half if torch.equal(cos[..., half], cos[..., spec.rotary_dim // 2 :]) else slice(0, None, 2)
        cos, sin = cos[..., lanes], sin[..., lanes]
    if cos.shape != ours.cos.shape:
        return f"{cos.shape[-1]} lanes, ours {ours.cos.shape[-1]} ({spec})"
    bound = float(cos.abs().max()) * (2e-6 + 4e-7 * (2 * far + 1))  # of an FP32 angle
    worst = max(float((cos - ours.cos).abs().max()), float((sin - ours.sin).abs().max()))
    if worst > bound:
        return f"cos and sin differ by {worst:.2g}, which may be {bound:.2g} ({spec})"
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 5, spec.head_dim, generator=generator) for _ in "qk")
    mine = apply_rotary(q, k, ours, interleaved=spec.interleaved)
    for got, want in zip(mine, _rotated(module, rotary, config, spec, (q, k), theirs), strict=True):
        worst = min(float((got[..., order] - want).abs().max()) for order in _orders(spec))
        if worst > 10 * bound:
            return f"rotated queries or keys differ by {worst:.2g}, interleaved is {spec.interleaved}"
    return ""


def _called(rotary, positions, layer_type, axes):
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    try:
        return rotary(torch.zeros(1, 1), positions, **arguments)
    except (IndexError, RuntimeError, ValueError):  # it takes axes, all equal
        assert axes.shape[0] == 3
        return rotary(torch.zeros(1, 1), positions.expand(3, -1, -1), **arguments)


def _orders(spec):
    """The channels as they are and, of adjacent pairs, as DeepSeek leaves them: first the even, then the odd."""
    channels = torch.arange(spec.head_dim)
    rotated = channels[: spec.rotary_dim]
    return (channels, torch.cat((rotated[0::2], rotated[1::2], channels[spec.rotary_dim :])))[: 1 + spec.interleaved]


def _rotated(module, rotary, config, spec, pair, tables):
    """Queries and keys by the function of the class's own module."""
    if isinstance(tables, torch.Tensor):
        if rotary.__name__.startswith("DeepseekV2"):
            return module.apply_rotary_emb(*pair, tables)
        return [x.transpose(1, 2) for x in module.apply_rotary_emb(*(x.transpose(1, 2) for x in pair), tables)]
    name = "apply_rotary_pos_emb"
    if hasattr(module, f"{name}_interleave") and getattr(config, "rope_interleave", True):
        name += "_interleave"
    apply = getattr(module, name)
    if spec.interleaved and hasattr(module, "deinterleave_head_dim"):
        pair = [module.deinterleave_head_dim(x) for x in pair]  # as the attention does before it calls the function
    if next(iter(inspect.signature(apply).parameters)) != "q":
        return [apply(x, *tables) for x in pair]
    try:
        return apply(*pair, *tables)
    except RuntimeError:  # it takes the rotated part alone
        parts = apply(*(x[..., : spec.rotary_dim] for x in pair), *tables)
        return [torch.cat((part, x[..., spec.rotary_dim :]), -1) for part, x in zip(parts, pair, strict=True)]


def outcomes(rotary, module, config_class):
    """What comes of each layer type under one configuration class: a difference in words, or a refusal."""
    config = built(config_class)
    found = {}
    for layer_type in layer_types(config):
        try:
            found[layer_type] = difference(
                rotary, module, config, layer_type, **ARGUMENTS.get(config_class.__name__, {})
            )
        except RopeConfigError as error:
            found[layer_type] = error
    return found
