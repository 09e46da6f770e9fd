"""What is given in place of what a function of torch draws: by its name, with torch's own parameters.

dropout(x, p, training)    p > 0 and training ─▶ noise.dropout by words      else ─▶ torch, which draws nothing
randn(2, 3)                                   ─▶ numbers.normal by words
multinomial(…)             no words for it    ─▶ torch, seeded by the unit
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from ...blocks.blocks import seeded
from . import noise, numbers


class Keys(Protocol):
    """Gives words and seeds for the call that is made now."""

    def words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return words for a tensor of this shape."""

    def seed(self) -> int:
        """Return a seed."""


class Call:
    """One call of a function of torch that may draw.

    Args:
        keys: by which it draws.
        function: of torch.
        args, kwargs: what it is given.
    """

    def __init__(
        self, keys: Keys, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._keys, self._function, self._args, self._kwargs = keys, function, args, kwargs
        self.name: str = function.__name__

    def answer(self) -> Any:
        """Return what the function is to give."""
        answer = _ANSWERS.get(self.name)
        if (
            answer is None
            or getattr(self._function, "__module__", "") == "torch.nn.init"
            or self._kwargs.get("out") is not None
        ):
            return self.seeded()
        return answer(self, *self._args, **self._kwargs)

    def plain(self) -> Any:
        """Call torch, which draws nothing."""
        return self._function(*self._args, **self._kwargs)

    def seeded(self) -> Any:
        """Call torch with its generators seeded by the unit."""
        with seeded(self._keys.seed(), 0, self._device()):
            return self._function(*self._args, **self._kwargs)

    def words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return 32 random bits for each number of a tensor of this shape, int64."""
        return self._keys.words(shape, device)

    def draw(self, device: torch.device) -> Callable[[Sequence[int]], Tensor]:
        """Return what gives words on a device."""
        return lambda shape: self.words(shape, device)

    def _device(self) -> torch.device | None:
        values = (*self._args, *self._kwargs.values())
        found = next((value.device for value in values if isinstance(value, Tensor)), None)
        named = self._kwargs.get("device")
        return torch.device(named) if found is None and named is not None else found

    @property
    def is_in_place(self) -> bool:
        """Whether the function's name says that it changes what it is given."""
        return self.name.endswith("_")


def _dropout(
    call: Call, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Any:
    if not (training and train) or p == 0 or not input.numel():
        return call.plain()
    inplace, draw = inplace or call.is_in_place, call.draw(input.device)
    if call.name.startswith("dropout") and call.name[7:] in ("", "_"):
        return noise.dropout(draw, input, p, inplace=inplace)
    if "alpha" in call.name:
        return noise.alpha_dropout(draw, input, p, features="feature" in call.name, inplace=inplace)
    samples = not (call.name == "dropout1d" and input.dim() == 2) and not (
        call.name == "dropout3d" and input.dim() == 4
    )
    return noise.feature_dropout(draw, input, p, samples=samples, inplace=inplace)


def _rrelu(
    call: Call,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: object = None,
) -> Any:
    if not training:
        return call.plain()
    return noise.rrelu(call.draw(input.device), input, lower, upper, inplace=inplace or call.is_in_place)


def _gumbel_softmax(
    call: Call, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    return noise.gumbel_softmax(call.draw(logits.device), logits, tau, hard, dim)


def _attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p == 0:
        return call.plain()
    if query.device.type != "cpu":
        return call.seeded()  # the fused kernels draw themselves
    return noise.attention(
        call.draw(query.device),
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _layer(call: Call, *args: Any, **kwargs: Any) -> Any:
    """An nn.MultiheadAttention."""
    given = inspect.signature(call._function).bind(*args, **kwargs)
    given.apply_defaults()
    draws = given.arguments["training"] and given.arguments["dropout_p"] > 0
    return call.seeded() if draws else call.plain()


def _recurrent(call: Call, *args: Any) -> Any:
    """A recurrent network: the number behind that of its layers is a probability, and then it says if it trains."""
    place = next(number for number, value in enumerate(args) if isinstance(value, float))
    return call.seeded() if args[place] > 0 and args[place + 1] else call.plain()


def _rand(call: Call, *size: Any, generator: object = None, **kind: Any) -> Any:
    return _made(call, torch.empty(*size, **kind), numbers.uniform)


def _randn(call: Call, *size: Any, generator: object = None, **kind: Any) -> Any:
    return _made(call, torch.empty(*size, **kind), _normal_of)


def _randint(call: Call, *bounds: Any, generator: object = None, **kind: Any) -> Any:
    *numbers_given, size = (*bounds, kind.pop("size")) if "size" in kind else bounds
    low, high = kind.pop("low", None), kind.pop("high", None)
    found = [number for number in (low, *numbers_given, high) if number is not None]
    low, high = found if len(found) == 2 else (0, found[0])
    made = torch.empty(size, **{"dtype": torch.int64, **kind})
    return made.copy_(numbers.integers(call.words(made.shape, made.device), low, high))


def _rand_like(call: Call, input: Tensor, generator: object = None, **kind: Any) -> Any:
    return _made(call, torch.empty_like(input, **kind), numbers.uniform)


def _randn_like(call: Call, input: Tensor, generator: object = None, **kind: Any) -> Any:
    return _made(call, torch.empty_like(input, **kind), _normal_of)


def _made(call: Call, made: Tensor, draw: Callable[[Tensor, torch.dtype], Tensor]) -> Any:
    if made.is_complex():
        return call.seeded()
    with torch.no_grad():
        return made.copy_(draw(call.words(made.shape, made.device), made.dtype))


def _normal_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.normal(words)


def _bernoulli(call: Call, input: Tensor, p: float | None = None, *, generator: object = None) -> Any:
    drawn = numbers.bernoulli(call.words(input.shape, input.device), input if p is None else p)
    return torch.empty_like(input, requires_grad=False).copy_(drawn)


def _bernoulli_in_place(call: Call, input: Tensor, p: float | Tensor = 0.5, *, generator: object = None) -> Tensor:
    return _filled(input, numbers.bernoulli(call.words(input.shape, input.device), p))


def _uniform(
    call: Call, input: Tensor, low: float = 0.0, to: float = 1.0, *, generator: object = None, **named: Any
) -> Any:
    low = named.get("from", low)
    return _filled(input, low + (to - low) * numbers.uniform(call.words(input.shape, input.device), input.dtype))


def _normal_in_place(
    call: Call, input: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: object = None
) -> Any:
    if input.is_complex():
        return call.seeded()
    return _filled(input, mean + std * numbers.normal(call.words(input.shape, input.device)))


def _normal(
    call: Call, mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, generator: object = None, **kind: Any
) -> Any:
    like = torch.empty(size, **kind) if size is not None else torch.broadcast_tensors(*_tensors(mean, std))[0]
    if like.is_complex():
        return call.seeded()
    drawn = numbers.normal(call.words(like.shape, like.device))
    return (mean + std * drawn).detach().to(like.dtype)


def _tensors(*values: Any) -> list[Tensor]:
    like = next(value for value in values if isinstance(value, Tensor))
    return [value if isinstance(value, Tensor) else torch.as_tensor(value).to(like) for value in values]


def _in_place(drawn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(call: Call, input: Tensor, *args: float, generator: object = None, **kwargs: float) -> Tensor:
        return _filled(input, drawn(call.words(input.shape, input.device), *args, **kwargs))

    return fill


def _exponential(words: Tensor, lambd: float = 1.0) -> Tensor:
    return numbers.exponential(words) / lambd


@torch.no_grad()
def _filled(tensor: Tensor, drawn: Tensor) -> Tensor:
    return tensor.copy_(drawn)


_ANSWERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"),
            _dropout,
        ),
        **dict.fromkeys(
            ("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"), _dropout
        ),
        **dict.fromkeys(("rrelu", "rrelu_"), _rrelu),
        **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
        "gumbel_softmax": _gumbel_softmax,
        "scaled_dot_product_attention": _attention,
        "multi_head_attention_forward": _layer,
        "rand": _rand,
        "randn": _randn,
        "randint": _randint,
        "rand_like": _rand_like,
        "randn_like": _randn_like,
        "bernoulli": _bernoulli,
        "bernoulli_": _bernoulli_in_place,
        "uniform_": _uniform,
        "normal_": _normal_in_place,
        "normal": _normal,
        "exponential_": _in_place(_exponential),
        "cauchy_": _in_place(numbers.cauchy),
        "log_normal_": _in_place(numbers.log_normal),
        "geometric_": _in_place(numbers.geometric),
    }
)
"""By name; all other functions that draw are seeded."""
