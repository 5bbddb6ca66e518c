"""FSDP2's reduce-scatter of gradients, compressed: an all-to-all of quantized parts, and float32 sums."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from grace.backends.runtime import check_group
from grace.backends.torch_distributed import TorchBackend
from grace.communicators.choice import build_communicator
from grace.core.api_names import REDUCE_SCATTER
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import ConfigError, ExchangeError
from grace.exchange.header import OVERFLOW, PRESENT
from grace.exchange.layout import Layout
from grace.kernels import kernels_of
from grace.session import checkpoint, state_schema
from grace.session.by_hand import WholeTensorPlan
from grace.session.settings import check_integer
from grace.session.setup import build_step_runner
from grace.session.step_runner import StepRunner
from grace.torch.fsdp_layout import ModuleLayout, above, before_steps, groups_of, layouts_of
from grace.torch.state_dict import on_devices, packed_up, unpacked
from grace.torch.uses import GradientUses


class ReduceScatterState:
    """What compressed reduce-scatters keep between steps: of each module, for each other rank of the shard group, what
    was left out of the part that it was sent; together the size of the unsharded gradients, in float32.

    A step ends where an optimizer makes one, or where a module comes a second time. If a gradient of any rank of the
    shard group was not finite, all of them get NaN, and keep what they remembered before; so does every replica, if
    :func:`register_fsdp_hook`'s exchange brought it that NaN.
    """

    def __init__(self, layouts: Sequence[ModuleLayout], runner: StepRunner, grad_scaler: Any):
        self.layouts, self.runner, self.grad_scaler = layouts, runner, grad_scaler
        self.backend: Any = runner.channel
        self.context = runner.context
        (self.communicator,) = runner.communicators
        self.compressor, self.memory = self.communicator.compressor, self.communicator.memory
        self.stateful_parts = list(self.communicator.stateful_parts.values())
        runner.follows_scaler = lambda: grad_scaler is not None and grad_scaler.is_enabled()
        self.sent_bytes = 0
        """That left this rank so far."""
        self.overflow = False
        self.seen: set[str] = set()
        self.wires: dict[str, tuple[Layout, torch.Tensor]] = {}
        self.trained = {layout.name: trained_of(layout) for layout in layouts}
        params = {name: p for trained in self.trained.values() for name, p in trained.items()}
        self.uses = GradientUses(params, None, "compress_reduce_scatter")
        self.unhook = before_steps(self, params.values())
        self.earlier = [groups_of(layout.module)[0]._reduce_scatter_comm for layout in layouts]

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to use the gradients; others may hold the other parameters."""
        self.uses.step_begins(optimizer)
        if not self.uses.waiting:
            self.close_step()

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has used the gradients."""
        self.uses.step_ends(optimizer)

    def close_step(self) -> None:
        """Commit what the last step changed; drop it if a gradient was not finite, and of modules whose gradients were
        thrown away."""
        if self.seen:
            dropped = self._dropped()
            thrown = self.uses.end(overflowed=dropped)
            modules = [name for name, trained in self.trained.items() if trained.keys() <= thrown]
            keys = [f"{name}/to_{to}" for name in modules for to in range(self.backend.size)]
            for part in self.stateful_parts:
                for key in keys:
                    part.state.rollback(key)
                part.state.rollback() if dropped else part.state.commit()
            self.context.step += 1
            self.seen.clear()
            self.overflow = False

    def _dropped(self) -> bool:
        """Whether a gradient of the step under way was not finite, in this shard group or on a replica."""
        return self.overflow or any([state.dropped for state in above(self.layouts)])

    @property
    def begun(self) -> bool:
        """True if gradients were reduced that no optimizer has used yet, and something is remembered of them."""
        return self.uses.unused and self.runner.stateful and not self._dropped()

    def _settle(self, saves: bool) -> None:
        if self.begun:
            raise ExchangeError(
                "gradients were reduced and scattered, and what that changes belongs to a step that no optimizer has "
                f"made yet: {'save' if saves else 'load'} after optimizer.step()"
            )
        self.close_step()

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers, as bytes under its own key: ``torch.distributed.checkpoint`` saves and loads it
        whole. Every rank must call it.

        Raises:
            ExchangeError: gradients were reduced, and no optimizer has used them yet.
        """
        self._settle(saves=True)
        return {self._key: packed_up(_written(checkpoint.save(self.runner)))}

    @property
    def _key(self) -> str:
        return f"rank_{dist.get_rank()}_of_{dist.get_world_size()}"

    def load_state_dict(self, given: dict[str, Any], memory: str = "strict") -> None:
        """Go on from what :meth:`state_dict` gave: of the same rank of as many; or, where ``given`` has the entries of
        all ranks of another run, from what they have left out together, dealt out anew, so that the mean has it once.
        :mod:`grace.session.checkpoint` has the rules, and says what ``memory`` may be. Every rank must call it.

        Raises:
            ConfigError: it is damaged, or another choice's; or another rank's, and not all are there.
            ExchangeError: gradients were reduced, and no optimizer has used them yet.
            RankError: another rank refused its state, or loads that of another save.
        """

        def read() -> dict[str, Any]:
            self._settle(saves=False)
            own = _opened(given.get(self._key)) if isinstance(given, dict) else None
            if own is not None:
                state_schema.check(own)
                self._check_choice(own, memory)
                if (own["rank"], own["size"]) == (self.backend.rank, self.backend.size):
                    return own  # type: ignore[no-any-return]
            return self._dealt_anew(given, memory)

        device = self.layouts[0].params[0].sharded_param.device
        replicas = [state.runner.backend for state in above(self.layouts)]
        checkpoint.load(self.runner, read, memory, lambda saved: on_devices(saved, {}, device), replicas)

    def _check_choice(self, saved: dict[str, Any], memory: str) -> None:
        if memory == "strict" and saved["components"] != self.runner.name:
            raise ConfigError(
                f"this state was saved with choice {saved['components']!r}, and here it is {self.runner.name!r}: "
                f"what was left out belongs to the method. Start without it, {self.context.api_names.otherwise}"
            )

    def _dealt_anew(self, given: Any, memory: str) -> dict[str, Any]:
        """A state for this rank, of those of all ranks of another run; each sender of a part takes as much of it."""
        given = given if isinstance(given, dict) else {}
        size, found = self.backend.size, [key for key in given if re.fullmatch(r"rank_\d+_of_\d+", str(key))]
        count = int(found[0].rpartition("_")[2]) if found else 0
        if count != len(found) or set(found) != {f"rank_{rank}_of_{count}" for rank in range(count)} or not count:
            raise ConfigError(
                f"this rank needs what {self._key} remembered in a shard group of {size}, or what all ranks of another "
                f"run did, to be dealt out anew, and there is {', '.join(map(str, given)) or 'nothing'}: load all of "
                "rank_0_of_N to rank_{N-1}_of_N into one dict, and give it here; or start without it"
            )
        calls = self.context.api_names
        opened = [_opened(given[f"rank_{rank}_of_{count}"]) for rank in range(count)]
        states, dropped = zip(*[checkpoint.undamaged(one, memory, calls) for one in opened], strict=True)
        self._check_choice(states[0], memory)
        for key in ("step", "size", "components", "seed"):
            if len({state[key] for state in states}) > 1:
                raise ConfigError(f"these ranks' states are not of one save: they differ in {key!r}. Load those of one")
        kept: dict[str, Any] = {}
        for layout in self.layouts:
            whole, beside = _together(layout, states, size / count / (size - 1))
            for to in range(size) if whole else ():
                if to != self.backend.rank:
                    row = torch.cat([_part(tensor, to, size) for tensor in whole])
                    kept[f"{layout.name}/to_{to}"] = {key: row if n is None else n for key, n in beside.items()} or row
        checkpoint.warn_dropped(list(itertools.chain(*dropped)), between=3)
        of_this_run = {"rank": self.backend.rank, "size": size, "pieces": checkpoint.partitions_of(self.runner)}
        return state_schema.seal({**states[0], **of_this_run, "state": {"memory": kept}})

    def close(self) -> None:
        """From now on reduce-scatters are torch's again."""
        self.close_step()
        self.unhook()
        self.runner.close()
        for layout, earlier in zip(self.layouts, self.earlier, strict=True):
            layout.module.set_custom_reduce_scatter(earlier)

    @torch.no_grad()
    def reduce(self, name: str, given: torch.Tensor, output: torch.Tensor, mean: bool) -> None:
        """Write the sum (or mean) over the shard group of this rank's part into ``output``."""
        if name in self.seen:
            self.close_step()
        if not self.seen and self.runner.follows_scaler():
            self.runner.rescale(self.grad_scaler.get_scale())
        self.seen.add(name)
        self.uses.exchanged(self.trained[name])
        if self.context.step < self.communicator.compress_after:
            self._reduce_uncompressed(given, output, mean)
            self._brought(name, output)
            return
        rank, size = self.backend.rank, self.backend.size
        rows = given.view(size, -1).float().unbind()
        k = kernels_of(given)
        finite = bool(k.all_finite(given))
        payloads = {}
        for to, row in enumerate(rows):
            if to != rank:
                payloads[to], ctx = self._encode(f"{name}/to_{to}", row, finite)
        if name not in self.wires:
            wire = Layout.from_payloads(k, [next(iter(payloads.values()))], sums=False)
            self.wires[name] = wire, torch.zeros(size * wire.length, dtype=torch.uint8, device=given.device)
        wire, buffer = self.wires[name]
        for to, payload in payloads.items():
            place = buffer[to * wire.length : (to + 1) * wire.length]
            wire.pack([payload], [PRESENT if finite else OVERFLOW], out=place)
        self.sent_bytes += (size - 1) * wire.length
        with self.backend.waiting_for_ranks(lambda: f"the reduce-scatter of module {name!r}"):
            arrived = self.backend.alltoall(buffer).wait()
        total, well = rows[rank].clone(), finite
        for sender, row in enumerate(arrived):
            if sender != rank:
                well = k.to_list(wire.statuses(row)) == [PRESENT] and well
                (payload,) = wire.unpack(row)
                total = self.compressor.accumulate(payload, ctx, total)
        if not well:
            self.overflow = True
            total.fill_(torch.nan)
        self._brought(name, total)
        output.copy_(total.div_(size) if mean else total)

    def _reduce_uncompressed(self, given: torch.Tensor, output: torch.Tensor, mean: bool) -> None:
        size = self.backend.size
        self.sent_bytes += (size - 1) * given.nbytes // size
        with self.backend.waiting_for_ranks(lambda: "a reduce-scatter"):
            dist.reduce_scatter_tensor(output, given, ReduceOp.SUM, group=self.backend.group)
        if mean:
            output.div_(size)

    def _brought(self, name: str, total: torch.Tensor) -> None:
        came = total.any()
        for parameter in self.trained[name]:
            self.uses.brought(parameter, came)

    def _encode(self, key: str, row: torch.Tensor, finite: bool) -> tuple[Any, Any]:
        if not finite:  # nobody will use it
            payload, ctx = self.compressor.compress(torch.zeros_like(row), key)
            return payload, ctx
        x = self.memory.compensate(row, key)
        payload, ctx = self.compressor.compress(x, key)
        self.memory.update(x, key, self.compressor, payload, ctx)
        return payload, ctx


def _written(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state under the names that it has in files: "choice", and "memory" by module and receiver."""
    state = dict(saved["state"])
    kept = {"choice": saved["components"], "memory": state.pop("memory", {}), "state": state}
    return {**{key: value for key, value in saved.items() if key != "components"}, **kept}


def _opened(packed: Any) -> Any:
    """Return what :func:`_written` was given, of bytes; damaged or not, which is looked at later."""
    saved = unpacked(packed)
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict) and {"choice", "memory"} <= saved.keys():
        saved = {**saved, "components": saved["choice"], "state": {**saved["state"], "memory": saved["memory"]}}
        del saved["choice"], saved["memory"]
    return saved


def _row(layout: ModuleLayout) -> int:
    """How many elements of a module's gradient each rank keeps."""
    trained = [param for param in layout.params if param.sharded_param.requires_grad]
    return sum(param.padded_sharded_param_size.numel() for param in trained)


def trained_of(layout: ModuleLayout) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module whose gradients are reduced, by name."""
    pairs = zip(layout.names, layout.params, strict=True)
    return {name: param.sharded_param for name, param in pairs if param.sharded_param.requires_grad}


def _part(tensor: torch.Tensor, to: int, size: int) -> torch.Tensor:
    """The part of a parameter's gradient that a rank keeps, flat, with zeros behind it up to its equal share."""
    rows = -(-tensor.shape[0] // size)
    flat = tensor[to * rows : (to + 1) * rows].reshape(-1)
    return torch.nn.functional.pad(flat, (0, rows * tensor[0].numel() - flat.numel()))


def _together(
    layout: ModuleLayout, states: Sequence[dict[str, Any]], weight: float
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """What all ranks of a run have left out of a module's gradients, by parameter, times a weight; and what their
    memory keeps beside it, with None for the tensor, if it keeps dicts. Nothing where nothing was kept.

    Raises:
        ConfigError: a parameter is cut along another dimension than its first, or has another size.
    """
    params = [param for param in layout.params if param.sharded_param.requires_grad]
    wholes = [torch.zeros(param._orig_size, device=param.sharded_param.device) for param in params]
    kept = [(state["state"].get("memory", {}).get(f"{layout.name}/to_{to}"), to, state["size"]) for state in states
            for to in range(state["size"])]  # fmt: skip
    kept = [(value, to, size) for value, to, size in kept if value is not None]
    for name, param in zip(layout.names, layout.params, strict=True):
        if kept and param.fsdp_placement.dim != 0:
            raise ConfigError(
                f"parameter {name!r} is sharded along dimension {param.fsdp_placement.dim}, and only what was left out "
                "along the first one can be dealt out anew. Start without it"
            )
    beside: dict[str, Any] = {}
    for value, to, size in kept:
        row = value
        if isinstance(value, dict):
            beside = {key: None if isinstance(one, torch.Tensor) else one for key, one in value.items()}
            row = next((one for one in value.values() if isinstance(one, torch.Tensor)), None)
        sizes = [_part(whole, to, size).numel() for whole in wholes]
        if not isinstance(row, torch.Tensor) or row.numel() != sum(sizes) or list(beside.values()).count(None) > 1:
            raise ConfigError(f"module {layout.name!r} has other parameters than in the run that was saved")
        for whole, part in zip(wholes, row.to(wholes[0].device).split(sizes), strict=True):
            rows = -(-whole.shape[0] // size)
            here = whole[to * rows : (to + 1) * rows]
            here += weight * part[: here.numel()].view_as(here)
    return (wholes, beside) if kept else ([], beside)


class CompressedReduceScatter:
    """What FSDP2 calls for one module: a ``ReduceScatter`` of its own, which lies in a private module."""

    def __init__(self, name: str, state: ReduceScatterState):
        self.name, self.grace_state = name, state

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise ConfigError(
                f"module {self.name!r}: a compressed reduce-scatter makes sums and means, and "
                f"set_gradient_divide_factor asks for {op}: divide the loss instead"
            )
        self.grace_state.reduce(self.name, input_tensor, output_tensor, op == ReduceOp.AVG)


def compress_reduce_scatter(
    model: Any,
    block: Any = "block(bits=8)",
    memory: Any = None,
    *,
    grad_scaler: Any = None,
    compress_after: int = 0,
    seed: int = 0,
) -> ReduceScatterState:
    """Compress the reduce-scatter of gradients within the shard groups of a sharded model.

    Each rank sends every other one the part of its gradient that the other keeps, compressed, and adds up in float32
    what it gets; its own part is exact. With :func:`register_fsdp_hook` these are the two levels of ZeRO++ and SDP4Bit.
    What is left out is remembered, which takes the size of the unsharded gradients in float32 on every rank:
    ``memory="none"`` for those who cannot pay.

    Args:
        model: a module that ``torch.distributed.fsdp.fully_shard`` was called on.
        block: the method: ``block``, or another one that may compress parts of a tensor alike.
        memory: what remembers; the method's default if left out.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        compress_after: steps that are reduced uncompressed first.
        seed: of the random numbers of stochastic methods; the same on all ranks.

    Returns:
        The state, with ``state_dict()``, ``load_state_dict()``, ``sent_bytes``, ``close()``.

    Raises:
        ConfigError: what was given cannot work.
        RankError: ranks of a shard group gave different things.

    Example::

        fully_shard(model)
        state = grace.torch.compress_reduce_scatter(model, "block(bits=4, hadamard=32)")
    """
    layouts = layouts_of(model, "compress_reduce_scatter", other_axes=False)
    check_group(TorchBackend())
    backend = TorchBackend(layouts[0].mesh.get_group())
    context = Context(seed=seed, api_names=REDUCE_SCATTER)
    facts = [
        ("the gradients of", "reduce-scatters"),
        ("grad_scaler", "none" if grad_scaler is None else "given"),
        ("compress_after", str(compress_after)),
        *((f"module {layout.name!r}", ", ".join(layout.names)) for layout in layouts),
    ]

    def rows() -> list[Variable]:
        """List what travels: of each module's gradient the part of each rank."""
        check_integer("compress_after", compress_after, low=0)
        return [
            Variable(f"{layout.name}/to_{rank}", (_row(layout),), device=str(layout.params[0].sharded_param.device))
            for layout in layouts
            for rank in range(backend.size)
        ]

    def choose() -> WholeTensorPlan:
        return WholeTensorPlan(None, None, _made(block, memory, backend.size))

    runner = build_step_runner(rows, choose, backend, context, facts, compress_after=compress_after)
    state = ReduceScatterState(layouts, runner, grad_scaler)
    for layout in layouts:
        layout.module.set_reduce_scatter_unused_params(True, recurse=False)
        layout.module.set_custom_reduce_scatter(CompressedReduceScatter(layout.name, state))
    return state


def _made(block: Any, memory: Any, size: int) -> Any:
    """The method and its memory, as a communicator has them.

    Raises:
        ConfigError: they do not suit.
    """
    if size == 1:
        raise ConfigError(
            "every rank holds a whole copy of the model, so that nothing is reduced and scattered: compress what the "
            "copies exchange, grace.torch.register_fsdp_hook(model, ...)"
        )
    made = build_communicator(block, memory, "allgather", size)
    traits, kept = made.compressor.traits, made.memory
    if not traits.shardable or traits.rounds > 1 or traits.fixed_size != "by shape" or made.compressor.votes:
        raise ConfigError(
            f"compress_reduce_scatter: {made.compressor.spec} cannot compress the parts of a gradient alike; use "
            "block, or qsgd, natural, terngrad, dynamic8"
        )
    if kept.owns_momentum or kept.needs_lr:
        raise ConfigError(f"compress_reduce_scatter: memory {kept.spec} needs the optimizer; use residual or loco")
    return made
