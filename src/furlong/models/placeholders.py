"""A model of which this process holds one pipeline stage: some layers, and modules beside them.

Config, list of layers and parameter names stay those of the whole model. Modules without parameters
stand where another stage holds something, so that transformers builds, reads, saves and runs the
rest as it does the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from furlong.errors import UnsupportedModelError


class PlaceholderLayer(nn.Module):
    """Stands for a layer of another stage: returns the hidden states that it is given."""

    num_returned = 0
    """Elements of the tuple that a layer returns; 0: hidden states alone."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return returned(hidden_states, self.num_returned)


class Inject(PlaceholderLayer):
    """Stands for the layer before a stage: returns the stage's input whatever it is given."""

    x: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self.x is not None
        return super().forward(self.x[None])  # (T, D) -> (1, T, D)


class Capture(PlaceholderLayer):
    """Stands for the layer after a stage: keeps the hidden states that it is given."""

    hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        self.hidden = hidden_states
        return super().forward(hidden_states)


def num_returned(output: Any) -> int:
    """Return the length of the tuple that a layer has returned; 0 if it returned no tuple."""
    return len(output) if isinstance(output, tuple) else 0


def returned(hidden_states: Tensor, num_returned: int) -> Any:
    """Return a layer's output: hidden states, or a tuple of `num_returned` starting with them."""
    if not num_returned:
        return hidden_states
    return (hidden_states, *(None,) * (num_returned - 1))


class Placeholder(nn.Module):
    """Stands for a module that another stage holds outside the layers.

    The decoder may call it, but uses nothing of the result: hidden states are returned unchanged,
    and for ids or positions the result is a zero, which adds nothing. The module's weight is kept
    as a tensor on meta, so that its shape is known.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor):
            self.__dict__["weight"] = torch.empty_like(weight, device="meta", requires_grad=False)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


class Carried(nn.Module):
    """Stands for a module that text does not pass, such as a vision tower, whose weights an export
    copies from the files of the checkpoint."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedModelError(
            given="a forward on text that calls a module for images or sound",
            required="a text decoder that runs by itself",
            source="the model's forward",
            change="train a model of another family",
        )


def in_place_of(module: nn.Module, placeholder: nn.Module) -> nn.Module:
    """Return `placeholder` with the plain attributes of `module`, which some decoders read."""
    plain = (str, int, float, bool, type(None))
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training" and isinstance(value, plain):
            setattr(placeholder, name, value)
    return placeholder


def placeholders(base: Any, layers: range) -> dict[str, nn.Module]:
    """Return name -> placeholder, for each module of a whole model that other stages hold.
    `layers`: the layers of this stage.

    The first stage holds the input embeddings and the modules that the decoder lists before its
    layers. The last stage holds the head and the modules that the decoder lists after its layers.
    If the head is tied to the input embeddings, the last stage holds the input embeddings, too.
    Raises UnsupportedModelError for a decoder that cannot be cut so.
    """
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    names = {id(module): name for name, module in base.named_modules()}
    list_name, own = layer_list(base)
    assert 0 <= layers.start < layers.stop <= len(own)
    found = {
        names[id(layer)]: in_place_of(layer, PlaceholderLayer())
        for index, layer in enumerate(own)
        if index not in layers
    }
    is_first, is_last = layers.start == 0, layers.stop == len(own)
    before, behind = _beside(base, list_name)
    gone = ([] if is_first else before) + ([] if is_last else behind)
    for module in gone:
        is_tied = module is embeddings and is_last and head.weight is embeddings.weight
        if not is_tied:
            found[names[id(module)]] = in_place_of(module, Placeholder(module))
    return found


def hold(base: Any, others: Mapping[str, nn.Module]) -> None:
    """Put placeholders, by name, into a model in place."""
    for name, placeholder in others.items():
        base.set_submodule(name, placeholder)
    names = {name for name, _ in base.named_parameters(remove_duplicate=False)}
    tied = base.all_tied_weights_keys
    base.all_tied_weights_keys = {a: b for a, b in tied.items() if {a, b} <= names}


@contextmanager
def constructed(kind: type[Any], change: Callable[[Any], None]) -> Iterator[None]:
    """Context manager: call `change` on each new model of the class `kind`. `from_pretrained` of
    transformers then has the model on meta, and reads weights for what `change` leaves in it.
    Models that `change` itself builds stay as they are."""
    plain, is_changing = kind.__init__, False

    @wraps(plain)
    def construct(self: Any, *given: Any, **named: Any) -> None:
        nonlocal is_changing
        plain(self, *given, **named)
        if not is_changing:
            is_changing = True
            try:
                change(self)
            finally:
                is_changing = False

    with patch.object(kind, "__init__", construct):
        yield


def local_layers_of(base: Any) -> range:
    """Return the range of layers that this process holds: all, or those of one stage."""
    if not any(isinstance(module, PlaceholderLayer) for module in base.modules()):
        # a decoder without a list of its layers is whole
        return range(int(base.config.get_text_config().num_hidden_layers))
    layers = enumerate(layer_list(base)[1])
    own = [index for index, layer in layers if not isinstance(layer, PlaceholderLayer)]
    return range(own[0], own[-1] + 1) if own else range(0)


def adapted_elsewhere(base: Any) -> list[str]:
    """Return the names of modules whose adapters belong to another stage: placeholders, and on the
    last stage the input embeddings, which are there for the tied head alone."""
    embeddings = base.get_input_embeddings() if local_layers_of(base).start else None
    return [
        name
        for name, module in base.named_modules()
        if isinstance(module, Placeholder) or module is embeddings
    ]


_ROUTED = {"gate", "router", "experts"}
"""Parts of the names of modules that choose experts, and of the experts among which they choose."""

NO_OUT_PROJ = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Model types in which peft refuses adapters of `out_proj`, which fused kernels read themselves."""


def all_linear(base: Any) -> list[str]:
    """Return the names of the linear layers for `all-linear`: without head, routers and experts."""
    head, bare = base.get_output_embeddings(), set(_ROUTED)
    if base.config.model_type in NO_OUT_PROJ:
        bare.add("out_proj")
    return [
        name
        for name, module in base.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and module is not head
        and bare.isdisjoint(name.split("."))
    ]


def decoder_of(base: Any) -> nn.Module:
    """Return the decoder of a model with a head.

    `get_decoder` of some families returns a model with a head (Llama 4's, whose `base_model_prefix`
    is its multimodal parent's). The decoder is then the only transformers model inside.
    """
    found: nn.Module = base.get_decoder()
    if found is not base and not isinstance(getattr(found, "lm_head", None), nn.Module):
        return found
    inner = [child for child in found.children() if isinstance(child, PreTrainedModel)]
    return inner[0] if len(inner) == 1 else found


def holders_of(base: nn.Module, decoder: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the modules that hold the decoder, outermost first, each with its name and the name of
    the child that leads to the decoder; [] if it is not inside."""
    path = next((name for name, module in base.named_modules() if module is decoder), "")
    parts = path.split(".") if path else []
    names = [".".join(parts[:depth]) for depth in range(len(parts))]
    return [(n, base.get_submodule(n), part) for n, part in zip(names, parts, strict=True)]


def head_holder(base: Any) -> tuple[Any, str]:
    """Return the innermost model with the head of `base`, and the name of its child that is the
    decoder or holds it; "" without one."""
    head, found = base.get_output_embeddings(), [(base, "")]
    for _, holder, inner in holders_of(base, decoder_of(base)):
        if holder is base or (head is not None and _head_of(holder) is head):
            found.append((holder, inner))
    return found[-1]


def _head_of(module: Any) -> nn.Module | None:
    return module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None


def is_tied(base: Any) -> bool:
    """Whether head and input embeddings are one weight, also where this process lacks the head."""
    return bool(getattr(head_holder(base)[0].config, "tie_word_embeddings", False))


def beside_decoder(base: nn.Module, decoder: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules beside the decoder, in it and in the modules that hold it."""
    return {
        f"{name}.{child_name}".lstrip("."): child
        for name, holder, inner in holders_of(base, decoder)
        for child_name, child in holder.named_children()
        if child_name != inner
    }


def carried(base: Any) -> dict[str, nn.Module]:
    """Return by name what stands for the modules of a model that are neither its text decoder nor
    its head."""
    beside, head = beside_decoder(base, decoder_of(base)), base.get_output_embeddings()
    return {
        name: module if isinstance(module, Carried) else in_place_of(module, Carried())
        for name, module in beside.items()
        if module is not head
    }


def layer_list(base: Any) -> tuple[str, nn.ModuleList]:
    """Return the name (in the decoder) of the list of a model's layers, and the list."""
    total = int(base.config.get_text_config().num_hidden_layers)
    for name, child in decoder_of(base).named_children():
        if isinstance(child, nn.ModuleList) and len(child) == total:
            return name, child
    raise uncuttable(type(base).__name__, f"holds no list of its {total} layers")


def _beside(base: nn.Module, list_name: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules with parameters that a model lists before its layers, and after them."""
    decoder = decoder_of(base)
    if any(True for _ in decoder.parameters(recurse=False)):
        raise uncuttable(type(base).__name__, "has parameters beside the modules of its decoder")
    children = list(decoder.named_children())
    at = [name for name, _ in children].index(list_name)
    before = list(_with_parameters(child for _, child in children[:at]))
    behind = list(_with_parameters(child for _, child in children[at + 1 :]))
    others = beside_decoder(base, decoder).values()
    return before, behind + list(_with_parameters(iter(others)))


def _with_parameters(modules: Iterator[nn.Module]) -> Iterator[nn.Module]:
    return (module for module in modules if any(True for _ in module.parameters()))


def uncuttable(name: str, what: str) -> UnsupportedModelError:
    """Return the error that refuses plans with several stages; `what`: the model's fault."""
    return UnsupportedModelError(
        given=f"{name} {what}",
        required="a decoder that can be cut between any two layers, for a plan of several stages",
        source="the model's forward, with its layers divided into stages",
        change="use order: chunk-first (and parallel.pp: 1), which runs all layers together",
    )
