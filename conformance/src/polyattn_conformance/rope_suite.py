"""The conformance kit for RoPE variants, as a pytest class."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from polyattn import (
    AttentionInputError,
    RopeConfigError,
    RopeSpec,
    RopeVariant,
    RotaryEmbedding,
    RotaryTables,
    apply_rotary,
    rope_variants,
)
from polyattn.rope import host_frequencies
from polyattn_conformance.failure import require


class RopeConformance:
    """What every RoPE variant must do, one test each.

    Subclass it in a test file, name the variant, and say what a valid spec of it has::

        from polyattn_conformance import RopeConformance


        class TestMine(RopeConformance):
            variant = "mine"
            parameters = {"factor": 4.0}
            refused = [{"factor": 0.5}]

    Attributes:
        variant: registered name, or an object that follows the protocol.
        parameters: parameters of a valid spec; those with a default may be left out.
        fields: other fields of that spec, where the ones below do not suit the variant.
        refused: parameter sets that the variant must refuse.
    """

    variant: ClassVar[str | RopeVariant]
    parameters: ClassVar[Mapping[str, Any]] = {}
    fields: ClassVar[Mapping[str, Any]] = {}
    refused: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @pytest.fixture(autouse=True)
    def _registered(self) -> Iterator[None]:
        given = self.variant
        scope = contextlib.nullcontext() if isinstance(given, str) else rope_variants.override(given.name, given)
        with scope:
            yield

    @property
    def _rule(self) -> RopeVariant:
        found: RopeVariant = rope_variants.get(self.variant) if isinstance(self.variant, str) else self.variant
        return found

    def _spec(self, parameters: Mapping[str, Any] | None = None, **fields: Any) -> RopeSpec:
        standard = {
            "theta": 10000.0,
            "head_dim": 16,
            "rotary_dim": 16,
            "interleaved": False,
            "max_position": 4096,
            "original_max_position": 1024,
        }
        given = self.parameters if parameters is None else parameters
        return RopeSpec(variant=self._rule.name, parameters=given, **{**standard, **self.fields, **fields})

    def _lengths(self, spec: RopeSpec) -> tuple[int | None, ...]:
        points = tuple(self._rule.breakpoints(spec)) if hasattr(self._rule, "breakpoints") else ()
        return (*points, points[-1] + 1) if points else (None,)

    def _tables(self, embedding: RotaryEmbedding, positions: torch.Tensor | None = None) -> RotaryTables:
        positions = torch.tensor([[0, 1, 7, 1023, 65535]]) if positions is None else positions
        tables: RotaryTables = embedding(positions, length=self._lengths(embedding.spec)[-1])
        return tables

    def _assert_unharmed(self, embedding: RotaryEmbedding) -> None:
        """It still gives the FP32 tables of a new embedding, to the bit."""
        got, want = self._tables(embedding), self._tables(RotaryEmbedding(self._spec()))
        for name, ours, new in (("cos", got.cos, want.cos), ("sin", got.sin, want.sin)):
            require(ours.dtype is torch.float32, f"{name} must be float32, got {ours.dtype}")
            require(torch.equal(ours, new), f"{name} differs from that of a new embedding")

    def test_frequencies_are_finite_float32_on_the_device_asked_for(self) -> None:
        """FP32 ``[rotary_dim / 2]``, scalings positive, whatever the default device and dtype are."""
        spec = self._spec()
        for length in self._lengths(spec):
            host_frequencies(self._rule, spec, length)
            with torch.device("meta"):
                host_frequencies(self._rule, spec, length)
            found = self._rule.frequencies(spec, device=torch.device("meta"), length=length)
            where = found.inv_freq.device
            require(where.type == "meta", f"inv_freq must be on the device asked for, meta, got {where}")

    def test_frequencies_are_a_pure_function(self) -> None:
        """The same spec gives the same bits, before and after other specs; ``pure = False`` says otherwise."""
        if not getattr(self._rule, "pure", True):
            pytest.skip("the variant declares pure = False")
        spec, other = self._spec(), self._spec(theta=500000.0)
        for length in self._lengths(spec):
            first = host_frequencies(self._rule, spec, length)
            host_frequencies(self._rule, other, length)
            again = host_frequencies(self._rule, spec, length)
            require(again == first, f"one spec, two answers: {first} and {again}; pure = False says so")

    def test_breakpoints_ascend_and_ask_for_a_length(self) -> None:
        """Lengths after which the frequencies change are ascending ints, and a caller must then say the length."""
        spec = self._spec()
        points = self._lengths(spec)[:-1]
        whole = [point for point in points if isinstance(point, int) and point > 0]
        require(list(points) == sorted(set(whole)), f"breakpoints must be ascending positive ints, got {points}")
        with pytest.raises(AttentionInputError, match="length must be"):
            RotaryEmbedding(spec)(torch.tensor([[0]]), length=None if points else 1)

    def test_spec_survives_its_canonical_form(self) -> None:
        """Written and read back it is the same value, and no field or parameter may be left out or added."""
        spec = self._spec()
        data = spec.to_dict()
        read = RopeSpec.from_dict(data)
        require((read, hash(read)) == (spec, hash(spec)), f"read back, {spec} is another value: {read}")
        for name in data["parameters"]:
            fewer = {key: value for key, value in data["parameters"].items() if key != name}
            with pytest.raises(RopeConfigError, match=name):
                RopeSpec.from_dict({**data, "parameters": fewer})

    def test_unknown_parameters_are_refused(self) -> None:
        """By name."""
        with pytest.raises(RopeConfigError, match="polyattn_unknown"):
            self._spec({**self.parameters, "polyattn_unknown": 1.0})

    def test_wrongly_typed_parameters_are_refused(self) -> None:
        """A number may be neither a string nor NaN, a list no number; the message names the parameter."""
        for name, value in self._spec().parameters.items():
            wrong = [["text"]] if isinstance(value, str) else ["text", float("nan")]
            for other in wrong:
                with pytest.raises(RopeConfigError, match=name):
                    self._spec({**self.parameters, name: other})

    def test_declared_refusals_are_refused(self) -> None:
        """Every parameter set in ``refused``."""
        for parameters in self.refused:
            with pytest.raises(RopeConfigError):
                self._spec(parameters)

    def test_frequencies_are_computed_once(self) -> None:
        """When the embedding is built, once for each interval of lengths; never by a forward or a move."""
        rule, calls = self._rule, []

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(rule, name)

            name, api_version = rule.name, rule.api_version

            def validate(self, spec: RopeSpec) -> None:
                rule.validate(spec)

            def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> Any:
                calls.append(device)
                return rule.frequencies(spec, device=device, length=length)

        with rope_variants.override(rule.name, Counting()):
            embedding = RotaryEmbedding(self._spec())
        built = len(calls)
        intervals = len(self._lengths(embedding.spec))
        require(built == intervals, f"building computed frequencies {built} times for {intervals} intervals of lengths")
        meta = torch.tensor([[3]], device="meta")
        for positions in (None, meta, None, meta):
            self._tables(embedding, positions)
        self._tables(embedding.to(torch.bfloat16))
        require(len(calls) == built, f"forwards and moves computed frequencies {len(calls) - built} times")

    def test_there_is_no_state(self) -> None:
        """No parameter, no buffer, an empty state dict."""
        embedding = RotaryEmbedding(self._spec())
        self._tables(embedding)
        state = [*embedding.state_dict(), *(name for name, _ in embedding.named_buffers())]
        state += [name for name, _ in embedding.named_parameters()]
        require(not state, f"an embedding must hold no state, got {state}")

    def test_casts_moves_and_meta_leave_it_unharmed(self) -> None:
        """``bfloat16``, ``half``, ``to("meta")``, ``to_empty``, and construction on the meta device."""
        harms: tuple[Callable[[RotaryEmbedding], RotaryEmbedding], ...] = (
            RotaryEmbedding.bfloat16,
            RotaryEmbedding.half,
            lambda embedding: embedding.to("meta"),
            lambda embedding: embedding.to("meta").to_empty(device="cpu"),
        )
        for harm in harms:
            embedding = RotaryEmbedding(self._spec())
            self._tables(embedding)
            self._assert_unharmed(harm(embedding))
        with torch.device("meta"):
            embedding = RotaryEmbedding(self._spec())
        self._assert_unharmed(embedding.to_empty(device="cpu"))

    def test_copies_and_pickles_work_alike(self) -> None:
        """Deep copies and pickled embeddings, used before or not."""
        embedding = RotaryEmbedding(self._spec())
        for _ in range(2):
            self._assert_unharmed(copy.deepcopy(embedding))
            self._assert_unharmed(pickle.loads(pickle.dumps(embedding)))  # noqa: S301
            self._tables(embedding)

    def test_autocast_and_inference_mode_leave_it_unharmed(self) -> None:
        """The tables stay FP32 and exact under autocast, and a forward in inference mode spoils no training."""
        embedding = RotaryEmbedding(self._spec())
        with torch.inference_mode():
            self._tables(embedding)
        with torch.autocast("cpu", torch.bfloat16):
            self._assert_unharmed(embedding)
            self._tables(embedding, torch.tensor([[3]], device="meta"))
        q = torch.randn(1, 1, 5, embedding.spec.head_dim, requires_grad=True)
        rotated, _ = apply_rotary(q, q, self._tables(embedding), interleaved=embedding.spec.interleaved)
        rotated.sum().backward()
        require(q.grad is not None, "no gradient came back through the rotation")

    def test_compiles_as_one_graph(self) -> None:
        """``torch.compile(fullgraph=True)``, with the same tables for changing lengths."""
        torch.compiler.reset()  # embeddings of other specs count against the same limit of recompilations
        embedding = RotaryEmbedding(self._spec())
        compiled = torch.compile(embedding, fullgraph=True, backend="eager")
        length = self._lengths(embedding.spec)[-1]
        for size in (3, 5):
            positions = torch.arange(size)[None]
            same = torch.equal(compiled(positions, length=length).cos, self._tables(embedding, positions).cos)
            require(same, f"the compiled embedding gives other tables for {size} positions")

    def test_a_row_is_rotated_the_same_beside_any_other(self) -> None:
        """Nothing depends on other rows or on what was seen before."""
        embedding = RotaryEmbedding(self._spec())
        short, long = torch.arange(4)[None], torch.arange(100_000, 100_004)[None]
        alone = self._tables(embedding, short).cos
        together = self._tables(embedding, torch.cat((short, long))).cos
        require(torch.equal(together[:1], alone), "a row is rotated otherwise beside a longer one")
        require(torch.equal(self._tables(embedding, short).cos, alone), "a row is rotated otherwise after a longer one")

    def test_layers_of_equal_spec_may_share(self) -> None:
        """A pure variant is shared by spec, an impure one only with itself."""
        first, second = RotaryEmbedding(self._spec()), RotaryEmbedding(dataclasses.replace(self._spec()))
        shared, pure = first.sharing_key() == second.sharing_key(), getattr(self._rule, "pure", True)
        require(shared == pure, f"pure = {pure}, yet embeddings of equal spec {'share' if shared else 'do not share'}")
