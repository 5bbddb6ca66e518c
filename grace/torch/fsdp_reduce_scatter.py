"""Compressed reduce-scatter of FSDP2's gradients: an all-to-all of quantized parts, and sums in float32."""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from grace.backends.runtime import check_group
from grace.backends.topology import two_hops
from grace.backends.torch_distributed import TorchBackend
from grace.core.api_names import REDUCE_SCATTER
from grace.core.backend import Backend
from grace.core.communicator import Communicator, MemoryArg
from grace.core.compressor import Compressor, Ctx, Payload
from grace.core.context import Context, SubgroupContext
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.errors import ConfigError, ExchangeError
from grace.exchange.layout import Layout
from grace.kernels import kernels_of
from grace.session import checkpoint, state_schema
from grace.session.by_hand import WholeTensorPlan
from grace.session.settings import check_integer
from grace.session.setup import build_step_runner
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner
from grace.torch.fsdp_layout import (
    TRAINED_BEFORE,
    ModuleLayout,
    ModulePasses,
    check_not_compressed,
    find_layouts,
    fsdp_param_groups,
    in_backward,
    reduce_scatter_states,
    replica_states,
    subscribe_to_steps,
)
from grace.torch.gradient_uses import GradientUses
from grace.torch.parameters import scaler_enabled
from grace.torch.shard_group import ShardGroupState, build_method, from_file_format
from grace.torch.state_dict import move_to_devices

INSIDE = " (inside nodes)"
"""Ending of the keys of wires inside nodes, after the module's name."""


class ReduceScatterState(ShardGroupState):
    """The state of compressed reduce-scatters between steps: the residuals of each module, for each other rank of the
    shard group, of the part that was sent to it. Together they have the size of the unsharded gradients, in float32.
    Where nodes have equally many ranks, and several, parts are added up inside each node first, and residuals are those
    of the sums that a rank sends to its peers on other nodes; what is sent inside a node leaves none.

    A step ends when an optimizer steps outside of backward, or when a module comes again in another backward pass. If a
    gradient of any rank of the shard group was not finite, all of them get NaN, and keep their former state; so does
    every replica that gets this NaN by :func:`register_fsdp_hook`'s exchange.
    """

    def __init__(
        self,
        layouts: Sequence[ModuleLayout],
        runner: StepRunner,
        grad_scaler: torch.amp.GradScaler | None,
        inside: Spec | Compressor | None = None,
    ):
        super().__init__(layouts, runner)
        self.grad_scaler = grad_scaler
        self.stateful_parts = list(self.communicator.stateful_parts.values())
        runner.callbacks.follows_scaler = partial(scaler_enabled, grad_scaler)
        self.hops = two_hops(self.backend, runner.node_names())
        self.peers: Backend = self.backend if self.hops is None else self.hops.peers
        """Backend over the ranks that compressed parts are exchanged with."""
        self.peer_ranks = list(range(self.backend.size)) if self.hops is None else self.hops.peer_ranks
        """Numbers in the shard group of the ranks of ``peers``."""
        self.inside: Compressor | None = None
        """Method of the sums inside nodes; None if they are exact."""
        if self.hops is not None and inside is not None:
            node = self.hops.node
            self.numbers |= {f"{name}{INSIDE}": number for name, number in self.numbers.items()}
            communicator = _build_inside(inside, self.backend.size)
            communicator.bind(SubgroupContext(self.context, node.rank, node.size), node)
            self.inside = communicator.compressor
        methods = [self.compressor] if self.inside is None else [self.compressor, self.inside]
        self.exact = all(method.traits.exact for method in methods) and not self.memory.stateful
        """True if nothing is lost, so that float64 gradients are sent and added up as such; else in float32."""
        self.overflow = False
        self.passes = ModulePasses()
        self.trained = {layout.name: trained_of(layout) for layout in layouts}
        self.numels = {layout.name: _shard_numel(layout) for layout in layouts}
        """Number of elements of each module's gradient that a rank keeps."""
        self.layout_of = {layout.name: layout for layout in layouts}
        params = {name: p for trained in self.trained.values() for name, p in trained.items()}
        self.uses = GradientUses(params, None, "")
        self.unhook = subscribe_to_steps(self, params.values())
        self.former_comms = [fsdp_param_groups(layout.module)[0]._reduce_scatter_comm for layout in layouts]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer is about to use the gradients. Other optimizers may hold the other parameters, so
        the step is closed when no gradient is unused; not in a backward pass, where those of other modules follow."""
        self.uses.begin_step(optimizer)
        if not self.uses.waiting and not in_backward():
            self.close_step()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has used the gradients. Called after its ``step()``."""
        self.uses.end_step(optimizer)

    def close_step(self) -> None:
        """Commit the changes of the last step. Roll them back if a gradient was not finite, and for modules whose
        gradients were discarded."""
        if not self.passes.seen:
            return
        dropped = self._dropped()
        discarded = self.uses.end_exchange(nothing_kept=dropped or not self.runner.stateful)
        # a module has one residual for all of its parameters: it is rolled back only if none of them was used
        modules = [name for name, trained in self.trained.items() if trained.keys() <= discarded]
        keys = [f"{name}/to_{to}" for name in modules for to in range(self.backend.size)]
        for part in self.stateful_parts:
            for key in keys:
                part.state.rollback(key)
            if dropped:
                part.state.rollback()
            else:
                part.state.commit()
        self.context.step += 1
        self.passes.clear()
        self.overflow = False

    def _dropped(self) -> bool:
        """Return True if a gradient of the step in progress was not finite, in this shard group or on a replica."""
        return self.overflow or any([state.dropped for state in replica_states(self.layouts)])

    def settle(self, saves: bool) -> None:
        """Commit the last step, so that its state can be saved or loaded; refuse in the middle of a step."""
        if self.runner.stateful and self._has_unused_gradients():
            raise ExchangeError(
                "the gradients of a step were reduced, and the optimizer has not made this step yet: "
                f"{'save' if saves else 'load'} after optimizer.step()"
            )
        self.close_step()

    def _has_unused_gradients(self) -> bool:
        """Return True if a rank of the shard group has gradients that an optimizer may still use. One collective, but
        none if optimizers have used all of them, so that a rank may save alone."""
        if not self.uses.waiting:
            return False
        gradients = self.uses.unused_gradients()
        # The sums of finite parts may overflow in float16, on the rank that keeps them alone.
        overflow = not all([bool(gradient.isfinite().all()) for gradient in gradients])
        flags = torch.tensor([bool(gradients), overflow], dtype=torch.float32, device=self.layouts[0].mesh.device_type)
        with self.backend.waiting_for_ranks(lambda: "the comparison of unused gradients"):
            unused, overflow = self.backend.allreduce(flags).wait().tolist()
        self.overflow = self.overflow or bool(overflow)
        return bool(unused) and not self._dropped()

    def load_state_dict(self, given: dict[str, Any], memory: str = "strict") -> None:
        """Restore a result of :meth:`state_dict`: of the same rank of as many ranks. If ``given`` has the entries of
        all ranks of another run instead, their summed residuals are redistributed, so that the mean has them once.
        :mod:`grace.session.checkpoint` documents the rules and the values of ``memory``. Every rank must call it.

        Raises:
            ConfigError: the state is damaged, or of another method; or it is of another rank, and entries are missing.
            ExchangeError: gradients were reduced, and no optimizer has used them yet.
            RankError: another rank refused its state, or loads that of another save.
        """

        def read() -> SavedState:
            """Return the state to load for this rank."""
            self.settle(saves=False)
            own = self.own_entry(given)
            if own is not None:
                state_schema.check(own)
                self.check_choice(own, memory)
                senders = {f"{layout.name}/to_{to}" for layout in self.layouts for to in self.peer_ranks}
                same = (own["rank"], own["size"]) == (self.backend.rank, self.backend.size)
                if (
                    same and own["state"].get("memory", {}).keys() <= senders
                ):  # else nodes were others, and residuals, too
                    return own  # type: ignore[no-any-return]
            return self._redistribute(given, memory)

        device = self.layouts[0].params[0].sharded_param.device
        replicas = [state.runner.backend for state in replica_states(self.layouts)]
        checkpoint.load(self.runner, read, memory, lambda saved: move_to_devices(saved, {}, device), replicas)

    def _redistribute(self, given: object, memory: str) -> SavedState:
        """Return a state for this rank, made of the states of all ranks of another run. Each sender of a part gets an
        equal share of the residual of that part."""
        given = given if isinstance(given, dict) else {}
        size = self.backend.size
        found = [key for key in given if re.fullmatch(r"rank_\d+_of_\d+", str(key))]
        count = int(found[0].rpartition("_")[2]) if found else 0
        if count != len(found) or set(found) != {f"rank_{rank}_of_{count}" for rank in range(count)} or not count:
            raise ConfigError(
                f"this rank needs the state of {self.key} in a shard group of {size}, or those of all ranks of another "
                f"run, and there is {', '.join(map(str, given)) or 'nothing'}: load all of rank_0_of_N to "
                "rank_{N-1}_of_N into one dict and pass it, or start without a state"
            )
        calls = self.context.api_names
        opened = [from_file_format(given[f"rank_{rank}_of_{count}"]) for rank in range(count)]
        states, dropped = zip(*[checkpoint.without_damaged(one, memory, calls) for one in opened], strict=True)
        self.check_choice(states[0], memory)
        for key in ("step", "size", "components", "seed"):
            if len({state[key] for state in states}) > 1:
                raise ConfigError(f"the ranks' states are of different saves ({key!r} differs): load those of one save")
        residuals: dict[str, object] = {}
        for layout in self.layouts:
            # A residual counted 1 / count in the old mean, and counts 1 / size in the new; a part has as many senders
            # as this rank has peers.
            sums, template = _sum_residuals(layout, states, size / count / (self.peers.size - 1))
            for to in self.peer_ranks if sums else ():
                if to != self.backend.rank:
                    row = torch.cat([_shard_of(tensor, to, size) for tensor in sums])
                    entry = {key: row if value is None else value for key, value in template.items()}
                    residuals[f"{layout.name}/to_{to}"] = entry or row
        checkpoint.warn_dropped(list(itertools.chain(*dropped)))
        of_this_run = {"rank": self.backend.rank, "size": size, "pieces": checkpoint.partitions_of(self.runner)}
        return state_schema.seal({**states[0], **of_this_run, "state": {"memory": residuals}})

    def close(self) -> None:
        """End the compression: from now on reduce-scatters are torch's again."""
        if self.closed:  # a later compression may have taken its place
            return
        self.closed = True
        self.close_step()
        self.unhook()
        self.runner.close()
        for layout, former in zip(self.layouts, self.former_comms, strict=True):
            layout.module.set_custom_reduce_scatter(former)

    @torch.no_grad()
    def reduce(self, name: str, given: torch.Tensor, output: torch.Tensor, mean: bool) -> None:
        """Write the sum (or mean) over the shard group of this rank's part into ``output``."""
        if output.numel() != self.numels[name]:  # residuals and wires have the former size
            raise ExchangeError(
                f"module {name!r}: each rank keeps {output.numel()} elements of its gradient, and kept "
                f"{self.numels[name]} when its reduce-scatter was compressed. {TRAINED_BEFORE}"
            )
        if self.passes.comes_again(name):
            self.close_step()
        if not self.passes.seen and self.grad_scaler is not None and self.runner.callbacks.follows_scaler():
            self.runner.rescale(self.grad_scaler.get_scale())
        self.passes.record(name)
        self.uses.record_exchange(self.trained[name])
        if self.context.step < self.communicator.compress_after:
            self._reduce_uncompressed(given, output, mean)
            self._record_mean(name, output)
            return
        if given.dtype is torch.float64 and not self.exact:
            given = given.float()  # before the check: what is finite in float64 may not be in float32
        k = kernels_of(given)
        finite = bool(k.all_finite(given))
        rows = given.view(self.backend.size, -1)
        if self.hops is None:
            sums = rows.to(_sum_dtype(rows))
        else:
            sums, finite = self._sum_in_node(name, rows, finite)
        encode = partial(self._encode_between, name)
        total, all_finite = self._sum_encoded(self.peers, name, list(sums), finite, self.compressor, encode)
        if not all_finite:
            self.overflow = True
            total.fill_(torch.nan)  # every rank of the group does so, and a GradScaler skips the step on all of them
        self._record_mean(name, total)
        output.copy_(total.div_(self.backend.size) if mean else total)

    def _sum_in_node(self, name: str, rows: torch.Tensor, finite: bool) -> tuple[torch.Tensor, bool]:
        """Return the sums over this rank's node of the parts of its peers, and True if all gradients of the node and
        these sums are finite.

        Args:
            rows: this rank's gradient, of each rank of the shard group the part that it keeps.
            finite: True if they are finite.
        """
        assert self.hops is not None
        node = self.hops.node
        if self.inside is not None:
            parts = [rows[column].reshape(-1).to(_sum_dtype(rows)) for column in self.hops.columns]
            encode = partial(self._encode_inside, name)
            total, finite = self._sum_encoded(node, f"{name}{INSIDE}", parts, finite, self.inside, encode)
            return total.view(len(self.peer_ranks), -1), finite and bool(kernels_of(total).all_finite(total))
        sent = rows.new_empty((node.size, len(self.peer_ranks) * rows.shape[1] + 1))
        for receiver, column in enumerate(self.hops.columns):
            sent[receiver, :-1] = rows[column].view(-1)
        sent[:, -1] = 0.0 if finite else torch.inf  # all ranks of the node must know, and tell their peers
        self.sent_bytes += (node.size - 1) * sent[0].nbytes
        with self.backend.waiting_for_ranks(lambda: f"the sums of module {name!r} over this node"):
            arrived = node.alltoall(sent.view(-1).view(torch.uint8)).wait()  # engines may not know the dtype
        total = torch.zeros_like(sent[0], dtype=_sum_dtype(sent))
        for part in arrived:  # in the order of ranks
            total += part.view(sent.dtype)
        return total[:-1].view(len(self.peer_ranks), -1), bool(kernels_of(total).all_finite(total))

    def _sum_encoded(
        self,
        backend: Backend,
        key: str,
        parts: Sequence[torch.Tensor],
        finite: bool,
        compressor: Compressor,
        encode: Callable[[int, torch.Tensor, bool], tuple[Payload, Ctx]],
    ) -> tuple[torch.Tensor, bool]:
        """Send each rank of a backend its part, compressed.

        Args:
            key: the key of the wire.
            parts: for each rank its part.
            finite: True if this rank's parts are finite.
            compressor: the method.
            encode: returns the payload and the ctx of a part, given the rank's number.

        Returns:
            the sum of this rank's own part, which is exact, and those that arrived; and True if all are finite.
        """
        rank = backend.rank
        k = kernels_of(parts[rank])
        payloads = {}
        for to, part in enumerate(parts):
            if to != rank:
                payloads[to], ctx = encode(to, part, finite)
        if key not in self.wires:  # sizes follow from shapes, so one layout and one buffer serve all steps
            wire = Layout.from_payloads(k, [next(iter(payloads.values()))], sums=False)
            buffer = torch.zeros(backend.size * wire.length, dtype=torch.uint8, device=parts[rank].device)
            self.wires[key] = wire, buffer
        wire, buffer = self.wires[key]
        for to, payload in payloads.items():
            row_buffer = buffer[to * wire.length : (to + 1) * wire.length]
            wire.pack([payload], [self.status_of(key, finite)], out=row_buffer)
        self.sent_bytes += (backend.size - 1) * wire.length
        with self.backend.waiting_for_ranks(lambda: f"the reduce-scatter of module {key!r}"):
            arrived = backend.alltoall(buffer).wait()
        total = parts[rank].clone()
        for sender, row in enumerate(arrived):  # in the order of ranks, so that sums do not depend on arrival
            if sender != rank:
                finite = self.is_finite(key, row, backend, sender) and finite
                (payload,) = wire.unpack(row)
                total = compressor.accumulate(payload, ctx, total)
        return total, finite

    def _encode_between(self, name: str, peer: int, part: torch.Tensor, finite: bool) -> tuple[Payload, Ctx]:
        """Compensate and compress a module's part for one of the peers."""
        return self._encode(f"{name}/to_{self.peer_ranks[peer]}", part, finite)

    def _encode_inside(self, name: str, number: int, part: torch.Tensor, finite: bool) -> tuple[Payload, Ctx]:
        """Compress a module's parts for one rank of this node and its peers."""
        x = part if finite else torch.zeros_like(part)
        assert self.inside is not None  # else sums inside nodes are exact
        return self.inside.compress(x, f"{name}/in_{number}")

    def _reduce_uncompressed(self, given: torch.Tensor, output: torch.Tensor, mean: bool) -> None:
        """Reduce and scatter by torch's own collective, before the compression begins."""
        size = self.backend.size
        self.sent_bytes += (size - 1) * given.nbytes // size
        with self.backend.waiting_for_ranks(lambda: "a reduce-scatter"):
            dist.reduce_scatter_tensor(output, given, ReduceOp.SUM, group=self.backend.group)
        if mean:
            output.div_(size)

    def _record_mean(self, name: str, total: torch.Tensor) -> None:
        """Record that a module's gradients were reduced."""
        for piece in self.layout_of[name].pieces(total):  # an unused parameter's zeros are no gradient that was cleared
            self.uses.record_mean(piece.name, piece.view(total).any())

    def _encode(self, key: str, row: torch.Tensor, finite: bool) -> tuple[Payload, Ctx]:
        """Compensate and compress the part for one receiver, and update its residual."""
        if not finite:  # receivers set their sums to NaN, because its status is OVERFLOW
            payload, ctx = self.compressor.compress(torch.zeros_like(row), key)
            return payload, ctx
        x = self.memory.compensate(row, key)
        payload, ctx = self.compressor.compress(x, key)
        self.memory.update(x, key, self.compressor, payload, ctx)
        return payload, ctx


def _sum_dtype(gradients: torch.Tensor) -> torch.dtype:
    """Return the dtype in which gradients are added up."""
    return torch.float64 if gradients.dtype is torch.float64 else torch.float32


def _shard_numel(layout: ModuleLayout) -> int:
    """Return the number of elements of a module's gradient that each rank keeps."""
    trained = [param for param in layout.params if param.sharded_param.requires_grad]
    return sum(param.padded_sharded_param_size.numel() for param in trained)


def trained_of(layout: ModuleLayout) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a module whose gradients are reduced, by name."""
    pairs = zip(layout.names, layout.params, strict=True)
    return {name: param.sharded_param for name, param in pairs if param.sharded_param.requires_grad}


def _shard_of(tensor: torch.Tensor, to: int, size: int) -> torch.Tensor:
    """Return the part of a parameter's gradient that a rank keeps, flat, padded with zeros to its equal share."""
    rows = -(-tensor.shape[0] // size)
    flat = tensor[to * rows : (to + 1) * rows].reshape(-1)
    return torch.nn.functional.pad(flat, (0, rows * tensor[0].numel() - flat.numel()))


def _sum_residuals(
    layout: ModuleLayout, states: Sequence[SavedState], weight: float
) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Sum the residuals of all ranks of a run for a module's gradients, times a weight.

    Returns:
        the sums by parameter, empty if no rank has a residual; and a template of the memory's entries: a dict with
        None in the residual's place, or an empty one if the memory saves the tensor alone.

    Raises:
        ConfigError: a parameter is cut along another dimension than its first, or has another size.
    """
    params = [param for param in layout.params if param.sharded_param.requires_grad]
    wholes = [torch.zeros(param._orig_size, device=param.sharded_param.device) for param in params]
    kept = [(state["state"].get("memory", {}).get(f"{layout.name}/to_{to}"), to, state["size"]) for state in states
            for to in range(state["size"])]  # fmt: skip
    kept = [(value, to, size) for value, to, size in kept if value is not None]  # a rank has no residual for itself
    for name, param in zip(layout.names, layout.params, strict=True):
        if kept and param.fsdp_placement.dim != 0:
            raise ConfigError(
                f"parameter {name!r} is sharded along dimension {param.fsdp_placement.dim}, and residuals can be "
                "loaded on another number of ranks only along dimension 0. Start without a state"
            )
    template: dict[str, object] = {}
    for value, to, size in kept:
        row = value
        if isinstance(value, dict):
            template = {key: None if isinstance(one, torch.Tensor) else one for key, one in value.items()}
            row = next((one for one in value.values() if isinstance(one, torch.Tensor)), None)
        sizes = [_shard_of(whole, to, size).numel() for whole in wholes]
        if not isinstance(row, torch.Tensor) or row.numel() != sum(sizes) or list(template.values()).count(None) > 1:
            raise ConfigError(f"module {layout.name!r} has other parameters than in the run that was saved")
        for whole, part in zip(wholes, row.to(wholes[0].device).split(sizes), strict=True):
            rows = -(-whole.shape[0] // size)
            target = whole[to * rows : (to + 1) * rows]
            target += weight * part[: target.numel()].view_as(target)
    return (wholes, template) if kept else ([], template)


class CompressedReduceScatter:
    """The ``ReduceScatter`` that FSDP2 calls for one module. FSDP2's own class for it is private."""

    def __init__(self, layout: ModuleLayout, state: ReduceScatterState):
        self.layout = layout
        self.grace_state = state  # fsdp_layout finds states by the name of this attribute

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise ConfigError(
                f"module {self.layout.name!r}: a compressed reduce-scatter makes sums and means, and "
                f"set_gradient_divide_factor asks for {op}: divide the loss instead"
            )
        self.layout.check_not_replaced()
        self.grace_state.reduce(self.layout.name, input_tensor, output_tensor, op == ReduceOp.AVG)


def compress_reduce_scatter(
    model: torch.nn.Module,
    block: Spec | Compressor = "block(bits=8)",
    memory: MemoryArg | None = None,
    *,
    inside: Spec | Compressor | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    compress_after: int = 0,
    seed: int = 0,
) -> ReduceScatterState:
    """Compress the reduce-scatter of gradients within the shard groups of a sharded model.

    Each rank sends to every other one the part of its gradient that the other keeps, compressed, and adds up the
    received parts in float32 (float64 gradients in float64 if ``block`` is "none"); its own part is exact.

    Where nodes have equally many ranks, and several, it takes two hops: parts are summed inside each node, exactly or
    by the method ``inside``, and these sums are sent, compressed, between the ranks of equal number on all nodes. So
    with N nodes a node's link carries (N - 1) / N of one payload of the model, and not one for each of its ranks. Ranks
    are on one node if their hosts' names (or GRACE_NODE) are the same.

    With :func:`register_fsdp_hook` these are the two levels of ZeRO++ and SDP4Bit. Residuals take the size of what a
    rank sends, in float32: that of the unsharded gradients, and of a node's part of them with two hops;
    ``memory="none"`` saves that memory.

    Args:
        model: a module that ``torch.distributed.fsdp.fully_shard`` was called on.
        block: the method: ``block``, or another one that may compress parts of a tensor alike.
        memory: the memory that keeps residuals; the method's default if left out.
        inside: the method of the sums inside nodes, without a memory, as "block(bits=8)"; they are exact if left out.
            Without two hops there are none.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        compress_after: steps that are reduced uncompressed first.
        seed: seed of the random numbers of stochastic methods; the same on all ranks.

    Returns:
        The state, with ``state_dict()``, ``load_state_dict()``, ``sent_bytes``, ``close()``.

    Raises:
        ConfigError: the arguments cannot work.
        RankError: the arguments of ranks of a shard group differ.

    Example::

        fully_shard(model)
        state = grace.torch.compress_reduce_scatter(model, "block(bits=4, hadamard=32)")
    """
    layouts = find_layouts(model, "compress_reduce_scatter", other_axes=False)
    check_group(TorchBackend())
    backend = TorchBackend(layouts[0].mesh.get_group())
    context = Context(seed=seed, api_names=REDUCE_SCATTER)
    facts = [
        ("the gradients of", "reduce-scatters"),
        ("grad_scaler", "none" if grad_scaler is None else "given"),
        ("compress_after", str(compress_after)),
        ("inside", "exact" if inside is None else str(getattr(inside, "spec", inside))),
        *((f"module {layout.name!r}", ", ".join(layout.names)) for layout in layouts),
    ]

    def rows() -> list[Variable]:
        """Check the arguments and list the variables to exchange: of each module's gradient the part of each rank."""
        check_integer("compress_after", compress_after, low=0)
        check_not_compressed(layouts, reduce_scatter_states, "the reduce-scatters")
        for layout in layouts:
            layout.check_real("compress_reduce_scatter")
        return [
            Variable(
                f"{layout.name}/to_{rank}", (_shard_numel(layout),), device=str(layout.params[0].sharded_param.device)
            )
            for layout in layouts
            for rank in range(backend.size)
        ]

    def choose() -> WholeTensorPlan:
        """Return the plan, which has the method and its memory."""
        if inside is not None:
            _build_inside(inside, backend.size)
        return WholeTensorPlan(None, None, _build_method(block, memory, backend.size))

    runner = build_step_runner(rows, choose, backend, context, facts, compress_after=compress_after)
    state = ReduceScatterState(layouts, runner, grad_scaler, inside)
    for layout in layouts:
        # buffers then have the same size on all ranks, whatever parameters a rank used
        layout.module.set_reduce_scatter_unused_params(True, recurse=False)
        layout.module.set_custom_reduce_scatter(CompressedReduceScatter(layout, state))
    return state


def _build_method(block: Spec | Compressor, memory: MemoryArg | None, size: int) -> Communicator:
    """Return the method and its memory, as a communicator that has both.

    Raises:
        ConfigError: the method or the memory cannot serve a reduce-scatter.
    """
    instead = (
        "nothing is reduced and scattered: compress what the copies exchange, grace.torch.register_fsdp_hook(model, "
        "...)"
    )
    built = build_method(block, memory, size, "compress_reduce_scatter", instead)
    if built.memory.owns_momentum or built.memory.needs_lr:
        raise ConfigError(
            f"compress_reduce_scatter: memory {built.memory.spec} needs the optimizer; use residual or loco"
        )
    return built


def _build_inside(inside: Spec | Compressor, size: int) -> Communicator:
    """Return the method of sums inside nodes, as a communicator that has it, without a memory.

    Raises:
        ConfigError: the method cannot serve them.
    """
    what = "compress_reduce_scatter(inside=...)"
    built = build_method(inside, "none", size, what, "nothing is reduced and scattered")
    if built.compressor.stateful:
        raise ConfigError(f"{what}: {built.compressor.spec} keeps state between steps; use block(bits=8)")
    return built
