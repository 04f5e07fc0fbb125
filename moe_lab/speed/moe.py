"""The fused layer for torch users: one call for the fused part, one module for the whole layer."""

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from moe_lab.machine import backend
from moe_lab.problem.contract import ARGUMENTS, BLOCK_TOKEN, Case
from moe_lab.problem.errors import BackendError, ContractError
from moe_lab.problem.layout import GroupedLayout, permute, unpermute
from moe_lab.problem.reference import Experts, route
from moe_lab.speed.autotune import tuned
from moe_lab.steps import STEPS


@functools.cache
def _entry(num_experts: int, hidden: int, intermediate: int) -> Callable[..., None]:
    """The step recommended here with the literals that tuning found for this shape, if it was tuned.

    On a Hopper GPU that is the end of the Hopper branch, whose instructions no other card has; on every other device,
    the CPU included, the end of the C500 branch: at most 64 KiB of shared memory.
    """
    branch = "hopper" if backend.is_hopper() else "c500"
    best = next(entry for entry in STEPS.values() if entry.recommended and entry.branch == branch)
    return backend.load(tuned(best.submission(), Case("fused_moe", num_experts, hidden, intermediate, 0)))


class _ForwardOnly(torch.autograd.Function):
    """Nothing but a place in the graph that says at ``backward()`` why it cannot go on, as torch's own operators do."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ContractError(
            "got backward() through fused_moe or MoE, expected a forward pass only: no step of the ladder has a "
            "backward; run it under torch.no_grad(), or train with moe_lab.problem.reference.moe_per_expert"
        )


def fused_moe(
    stacked_tokens: torch.Tensor, experts: Experts, route_weights: torch.Tensor, layout: GroupedLayout
) -> torch.Tensor:
    """Run the best step for this device on tokens in the grouped layout. Forward only: ``backward()`` is refused.

    ``stacked_tokens`` (P, H) fp16 are as :func:`moe_lab.problem.layout.permute` makes them, ``experts`` fp16, the
    ``route_weights`` (N,) fp32 in raw order, blocks of 128 rows; all contiguous on one device, or it is a
    ContractError. Returns (P, H) fp16: ``down(silu(gate(x)) * up(x)) * route weight`` in valid rows, 0 in padding rows.
    """
    _check(stacked_tokens, experts, route_weights, layout)
    sources = (stacked_tokens, experts.gate_w, experts.up_w, experts.down_w, route_weights)
    out = torch.zeros_like(stacked_tokens, requires_grad=False)
    if layout.num_rows:
        num_experts, intermediate, hidden = experts.gate_w.shape
        # The number of rows changes with every routing and must not cost another load.
        entry = _entry(num_experts, hidden, intermediate)
        rows = (layout.sizes, layout.offsets, layout.padded_offsets, layout.block_map)
        integers = (torch.tensor(numbers, dtype=torch.int32, device=out.device) for numbers in rows)
        entry(*(source.detach() for source in sources), *integers, out)
    result: torch.Tensor = _ForwardOnly.apply(out, *sources)
    return result


def _check(tokens: torch.Tensor, experts: Experts, route_weights: torch.Tensor, layout: GroupedLayout) -> None:
    _check_type("experts", experts, Experts, "Experts")
    _check_type("a layout", layout, GroupedLayout, "GroupedLayout")
    given = {"stacked_tokens": tokens, **vars(experts), "route_weights": route_weights}
    for name, tensor in given.items():
        _check_type(name, tensor, torch.Tensor, "a torch.Tensor")
    if experts.gate_w.dim() != 3 or not experts.gate_w.numel():
        raise ContractError(f"got gate_w {tuple(experts.gate_w.shape)}, expected (E, I, H), each at least 1")
    num_experts, intermediate, hidden = experts.gate_w.shape
    if layout.block != BLOCK_TOKEN:
        raise ContractError(f"got a layout with blocks of {layout.block} rows, expected {BLOCK_TOKEN}")
    if layout.num_experts != num_experts:
        raise ContractError(f"got a layout of {layout.num_experts} experts, expected {num_experts} as in the weights")
    extents = Case("fused_moe", num_experts, hidden, intermediate, layout.num_rows).extents(layout.num_padded_rows)
    for (name, tensor), argument in zip(given.items(), ARGUMENTS, strict=False):
        shape, dtype = tuple(extents[symbol] for symbol in argument.shape), getattr(torch, argument.dtype)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ContractError(f"got {name} {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {dtype}")
        if not tensor.is_contiguous():
            raise ContractError(f"got {name} with strides {tensor.stride()}, expected a contiguous tensor")
        if tensor.device != tokens.device:
            raise ContractError(f"got {name} on {tensor.device}, expected {tokens.device} as the tokens")
    _check_runs_here(tokens.device)


def _check_type(name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise ContractError(f"got {name} of type {type(value).__name__}, expected {expected}")


def _check_runs_here(device: torch.device) -> None:
    here = backend.detect()
    if device.type != here.torch_device:
        where = f"{here.torch_device}, where this machine's kernels run ({here.name})"
        raise ContractError(f"got tensors on {device}, expected {where}: move the tokens and the weights there")


def _at_least_1(name: str, value: object) -> int:
    """A size as a plain integer; NumPy's integers are welcome, True and 256.0 are not."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)  # type: ignore[arg-type]
        if number >= 1 and not isinstance(value, bool):
            return number
    raise ContractError(f"got {name}={value!r}, expected an integer of at least 1")


class MoE(torch.nn.Module):
    """A Mixture-of-Experts layer: router, permute, fused experts, unpermute. Forward only, weights in fp16.

    A token's route weights are the ``top_k`` largest of its softmax, divided by their sum. The weights are random and
    require no gradient: copy yours into them, or load a state dict. ``backward()`` through the result, where something
    requires a gradient, raises a :class:`ContractError`, and so does a size that is no integer or too small, a top_k
    above E or no device at all; a device that this machine does not have is a BackendError.
    """

    def __init__(
        self, hidden: int, intermediate: int, num_experts: int, top_k: int, device: str | torch.device | None = None
    ) -> None:
        super().__init__()
        given = {"hidden": hidden, "intermediate": intermediate, "num_experts": num_experts, "top_k": top_k}
        hidden, intermediate, num_experts, self.top_k = (_at_least_1(name, size) for name, size in given.items())
        if self.top_k > num_experts:
            raise ContractError(f"got top_k={top_k}, expected 1 to {num_experts}, the number of experts")
        try:
            known = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError):
            expected = "one that torch knows, such as 'cpu' or 'cuda'"
            raise ContractError(f"got device={device!r}, expected {expected}") from None
        try:
            torch.empty(0, device=known)
        # What torch raises for a device that it knows and does not have is not the same for any two of them.
        except (RuntimeError, AssertionError):
            found = f"got device={str(known)!r}, which this machine or its torch does not have"
            raise BackendError(f"{found}, expected {backend.detect().torch_device!r} here") from None

        def weight(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, dtype=torch.float32, device=device) * shape[-1] ** -0.5
            return torch.nn.Parameter(values.half(), requires_grad=False)

        self.router_w = weight(num_experts, hidden)
        self.gate_w = weight(num_experts, intermediate, hidden)
        self.up_w = weight(num_experts, intermediate, hidden)
        self.down_w = weight(num_experts, hidden, intermediate)

    def extra_repr(self) -> str:
        """What ``print(layer)`` shows."""
        num_experts, intermediate, hidden = self.gate_w.shape
        return f"hidden={hidden}, intermediate={intermediate}, num_experts={num_experts}, top_k={self.top_k}"

    @property
    def experts(self) -> Experts:
        """The expert weights as :mod:`moe_lab.problem.reference` takes them."""
        return Experts(self.gate_w, self.up_w, self.down_w)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Route every token to its experts and add their results: (..., H) fp16 to the same, on the weights' device.

        Raises ContractError for another type, last dimension, dtype or device; BackendError as :func:`fused_moe`.
        """
        hidden = self.router_w.shape[1]
        expected = f"a tensor (..., {hidden}) torch.float16"
        _check_type("tokens", tokens, torch.Tensor, expected)
        if tokens.shape[-1:] != (hidden,) or tokens.dtype != torch.float16:
            raise ContractError(f"got tokens {tuple(tokens.shape)} {tokens.dtype}, expected {expected}")
        if tokens.device != self.router_w.device:
            raise ContractError(f"got tokens on {tokens.device}, expected {self.router_w.device} as the weights")
        _check_runs_here(tokens.device)
        with torch.no_grad():
            flat = tokens.reshape(-1, hidden)
            choices, weights = route(flat, self.router_w, self.top_k)
            layout = GroupedLayout.from_choices(choices, self.router_w.shape[0])
            stacked, raw_weights, source = permute(flat, choices, weights, layout)
            out = fused_moe(stacked, self.experts, raw_weights.contiguous(), layout)
            results = unpermute(out, source, layout, flat.shape[0], self.top_k).view(tokens.shape)
        result: torch.Tensor = _ForwardOnly.apply(results, tokens, self.router_w, self.gate_w, self.up_w, self.down_w)
        return result
