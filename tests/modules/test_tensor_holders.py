"""Whatever holds tensors is compared by identity: equality by value would compare tensors, or guard on them."""

import dataclasses
import importlib
import pkgutil
import sys
import typing

import pytest
import torch

PACKAGES = ("polyattn", "polyattn_eager", "polyattn_sdpa", "polyattn_flex", "polyattn_fa2")


def modules():
    for name in PACKAGES:
        package = importlib.import_module(name)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not found.name.endswith(("__main__", ".flash_attn")) and not found.name.startswith("polyattn.testing"):
                yield importlib.import_module(found.name)


def dataclasses_of(module):
    for value in vars(module).values():
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
            yield value


def holds_tensors(kind, seen=()):
    """Whether a field may hold a tensor, by itself or inside another dataclass."""
    namespace = {**vars(sys.modules[kind.__module__]), **vars(typing), "torch": torch, "Tensor": torch.Tensor}
    for field in dataclasses.fields(kind):
        text = field.type if isinstance(field.type, str) else str(field.type)
        if "Tensor" in text:
            return True
        others = [value for name, value in namespace.items() if name in text and dataclasses.is_dataclass(value)]
        if any(other is not kind and other not in seen and holds_tensors(other, (*seen, kind)) for other in others):
            return True
    return False


KINDS = [kind for module in modules() for kind in dataclasses_of(module)]
HOLDERS = [kind for kind in KINDS if holds_tensors(kind)]


def test_the_walk_finds_layouts_results_tables_and_prepared_state():
    names = {kind.__name__ for kind in HOLDERS}
    assert names >= {"MaskLayout", "StructuredMask", "PreparedAttention", "AttentionResult", "RotaryTables"}
    assert names >= {"EagerState", "SdpaPlan", "FlashPlan"}
    assert "AttentionSpec" not in names
    assert "AttentionRequest" not in names


@pytest.mark.parametrize("kind", HOLDERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_holders_of_tensors_are_equal_only_to_themselves(kind):
    assert kind.__eq__ is object.__eq__
    assert kind.__hash__ is object.__hash__
