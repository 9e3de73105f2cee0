"""Measure a trunk of Qwen3.8-Flash-Next at true width, with few layers, beside transformers' own on the same weights.

    python tools/measure_trunk.py --layers 4 --tokens 8192
    python tools/measure_trunk.py --alone --kernels 30

Both take the same prompt with a small table of n-grams that lies on the device, from embeddings to hidden states, and
keep the state of the sequence; transformers at once and ours in ubatches. They run in turns, there and back, after one
run each that is not counted and whose results are compared: if these differ, nothing is printed. A layer's time is
that of all, divided by how many there are, embeddings and the last mixing included.
The second table says where our time goes, by parts of a layer and, with --kernels, by kernels of the device.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    raise SystemExit(f"measure_trunk: error: models are measured with torch: {error}") from None

from lazyio.engine.models import Model, model_class
from lazyio.engine.synthetic.configs import config_of
from lazyio.engine.ubatch import Ubatch
from lazyio.engine.weights.dummy import draw
from lazyio.kernels.measuring import end
from lazyio.ple.rowids import NgramRowIds
from lazyio.ple.spec import NgramHash

OURS, THEIRS = "lazyio", "transformers"
# The parts that are timed, by their class; those of the second take in blocks of the first.
BLOCKS = {
    "GatedDeltaNet": "gated delta nets",
    "GatedAttention": "attention",
    "SparseMoe": "experts",
    "NgramEmbedding": "the block with the table",
}
AROUND = {"HyperConnection": "hyper-connections", "StreamMixer": "hyper-connections"}
WITHIN = {"BlockSelection": "of attention: selection", "Experts": "of experts: those routed to"}
console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Resident:
    """Rows of a table that is on the device."""

    table: torch.Tensor
    ids: torch.Tensor

    def values(self) -> torch.Tensor:
        return nn.functional.embedding(self.ids, self.table).flatten(1)


@dataclass(frozen=True, slots=True)
class Ours:
    """Our model, its table, and the row ids of the prompt."""

    model: Model
    table: torch.Tensor
    ids: torch.Tensor  # int64 [tokens, rows a token]

    def prefill(self, tokens: list[int], ubatch: int) -> torch.Tensor:
        """Hidden states of all tokens."""
        state, found = self.model.new_state(len(tokens)), []
        for start in range(0, len(tokens), ubatch):
            part = Ubatch.of([(state, tokens[start : start + ubatch])], self.model.device)
            found.append(self.model.step(part, Resident(self.table, self.ids[start : start + ubatch])))
        return torch.cat(found)


def main(
    layers: Annotated[int, typer.Option(min=2, help="Layers, the fourth with attention; 5 GB each.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    ubatch: Annotated[int, typer.Option(help="Tokens of our ubatches.")] = 2048,
    rows: Annotated[int, typer.Option(help="Rows of the table, about.")] = 320_000,
    rounds: Annotated[int, typer.Option(help="Rounds: transformers, ours, ours, transformers.")] = 1,
    alone: Annotated[bool, typer.Option("--alone", help="Leave transformers out.")] = False,
    kernels: Annotated[int, typer.Option(help="Print so many kernels that took longest.")] = 0,
    size: Annotated[str, typer.Option(help="tiny or true; on a CPU only tiny makes sense.")] = "true",
) -> None:
    if layers < 4 and not alone:
        raise typer.BadParameter("transformers takes no fewer than 4 layers, the fourth has attention; or give --alone")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if size == "true" and device.type == "cpu":
        end("there is no GPU for layers of true size: give --size tiny")
    made = torch.Generator().manual_seed(0)
    reference = build_reference(size, layers, rows, device)
    vocab = reference.config.vocab_size
    prompt = torch.randint(0, vocab, (tokens,), generator=made).tolist()
    ours = build_ours(reference, prompt)
    console.print(f"{layers} layers, {tokens:,} tokens, ubatches of {ubatch:,}, torch {torch.__version__}, {device}")
    given = torch.tensor([prompt], device=device)

    def theirs() -> torch.Tensor:
        found: torch.Tensor = reference.model(input_ids=given, use_cache=True).last_hidden_state[0]
        return found

    ways: dict[str, Callable[[], torch.Tensor]] = {OURS: lambda: ours.prefill(prompt, ubatch)}
    if not alone:
        ways[THEIRS] = theirs
    with torch.inference_mode():
        show_times(compare(ways, rounds, device), layers)
        show_parts(ours, prompt, ubatch, device)
        if kernels:
            show_kernels(ways[OURS], kernels, device)


# --- the two models ---------------------------------------------------------------------------------------------------


def build_reference(size: str, layers: int, rows: int, device: torch.device) -> Any:
    """The causal model of transformers, of random weights, in bfloat16 on a GPU."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        end(f"weights come from a model of transformers, with --alone too: {error}")

    config, _ = config_of("qwen4_exp", size, end=3, vocab=4, layers=layers, rows=rows)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            own = transformers.Qwen4ExpTextConfig(**{**config, "eos_token_id": 3, "pad_token_id": None})
            model = transformers.Qwen4ExpForCausalLM(own)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def build_ours(reference: Any, prompt: list[int]) -> Ours:
    """Our model on the same memory, once that has been given random values, and the rows of a prompt."""
    config = reference.config.to_dict()
    with torch.device("meta"):
        model = model_class(config["model_type"]).from_config(config)
    assert model.table is not None
    weights = reference.state_dict()
    shared = {name: weights[name].float() if name in model.float32 else weights[name] for name in model.state_dict()}
    model.load_state_dict(shared, assign=True)
    model.requires_grad_(False)
    table = weights[model.table]
    made = torch.Generator(table.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        draw(model.get_submodule(module), last, parameter, made)
        if name in model.float32:
            parameter.copy_(weights[name].copy_(parameter).float())  # what transformers has is rounded
    table.normal_(generator=made)
    return Ours(model, table, torch.from_numpy(row_ids_of(reference)(prompt)).to(table.device))


def row_ids_of(reference: Any) -> NgramRowIds:
    constants = next(module for module in reference.modules() if hasattr(module, "layer_multipliers"))
    return NgramRowIds(
        NgramHash(
            tuple(constants.layer_multipliers.tolist()),
            tuple(constants.head_vocab_sizes),
            tuple(constants.head_offsets),
            constants.heads_per_ngram,
            reference.config.eos_token_id,
        )
    )


# --- in turns ---------------------------------------------------------------------------------------------------------


def compare(ways: dict[str, Callable[[], torch.Tensor]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each run. Exits if results differ by more than rounding, and the other choices it leads to."""
    found = {name: way() for name, way in ways.items()}
    if THEIRS in found:
        error = ((found[OURS].float() - found[THEIRS].float()).norm() / found[THEIRS].float().norm()).item()
        console.print(f"hidden states differ by {error:.2g} of their size")
        # In float32 nothing is rounded as far, but of blocks with equal scores, as of 0, each takes others.
        if not error < (0.2 if device.type == "cuda" else 2e-2):
            raise SystemExit("the results disagree, so no time counts")
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = [THEIRS, OURS, OURS, THEIRS] if THEIRS in ways else [OURS, OURS]
    for name in order * rounds:
        wait(device)
        since = time.perf_counter()
        ways[name]()
        wait(device)
        times[name].append(1e3 * (time.perf_counter() - since))
    return times


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show_times(times: dict[str, list[float]], layers: int) -> None:
    table = Table("way", "ms, median [min, max]", "ms a layer", "its time over ours", box=None)
    ours = statistics.median(times[OURS])
    for name, some in times.items():
        middle = statistics.median(some)
        spread = f"{middle:,.1f} [{min(some):,.1f}, {max(some):,.1f}]"
        table.add_row(name, spread, f"{middle / layers:,.2f}", f"{middle / ours:.2f}")
    console.print(table)


# --- where time goes --------------------------------------------------------------------------------------------------


@contextmanager
def timed_parts(model: nn.Module, device: torch.device) -> Iterator[dict[str, list[Callable[[], float]]]]:
    """Milliseconds of all calls of the parts, by name; read them once the device is done."""
    spans: dict[str, list[Callable[[], float]]] = defaultdict(list)
    hooks = []
    for module in model.modules():
        kind = (BLOCKS | AROUND | WITHIN).get(type(module).__name__)
        if kind is None:
            continue
        begun: list[Any] = []

        def before(*_: object, begun: list[Any] = begun) -> None:
            begun.append(moment(device))

        def after(*_: object, begun: list[Any] = begun, kind: str = kind) -> None:
            spans[kind].append(between(begun.pop(), moment(device)))

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield spans
    finally:
        for hook in hooks:
            hook.remove()


def moment(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> Callable[[], float]:
    if isinstance(first, float):
        return lambda: 1e3 * (second - first)
    return lambda: float(first.elapsed_time(second))


def parts_of(ours: Ours, prompt: list[int], ubatch: int, device: torch.device) -> tuple[dict[str, float], float]:
    """Milliseconds by part, and of the whole. What a hyper-connection takes is without the block that it is around."""
    with timed_parts(ours.model, device) as spans:
        start = moment(device)
        ours.prefill(prompt, ubatch)
        end = moment(device)
        wait(device)
    total = {name: sum(span() for span in some) for name, some in spans.items()}
    inside = sum(total.get(name, 0.0) for name in ("gated delta nets", "attention", "experts"))
    total["hyper-connections"] -= inside
    return total, between(start, end)()


def show_parts(ours: Ours, prompt: list[int], ubatch: int, device: torch.device) -> None:
    parts_of(ours, prompt, ubatch, device)  # events are made on first use
    parts, whole = parts_of(ours, prompt, ubatch, device)
    table = Table("part", "ms", "of the whole", box=None)
    shown = list(dict.fromkeys([*BLOCKS.values(), *AROUND.values()]))
    rest = whole - sum(parts.get(name, 0.0) for name in shown)
    for name, some in [*((name, parts.get(name, 0.0)) for name in shown), ("the rest", rest), ("whole", whole)]:
        table.add_row(name, f"{some:,.2f}", f"{some / whole:.1%}")
    for name in WITHIN.values():
        if name in parts:
            table.add_row(name, f"{parts[name]:,.2f}", f"{parts[name] / whole:.1%}")
    console.print(table)


def show_kernels(run: Callable[[], object], count: int, device: torch.device) -> None:
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        run()
        wait(device)
    of_device = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    kernels = sorted(profiled.key_averages(), key=lambda one: -getattr(one, of_device))[:count]
    table = Table("kernel", "calls", "ms", box=None)
    for one in kernels:
        table.add_row(one.key[:90], str(one.count), f"{getattr(one, of_device) / 1e3:,.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
