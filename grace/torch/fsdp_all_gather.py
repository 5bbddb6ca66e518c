"""Compressed all-gather of FSDP2's weights: every rank computes with the same decoded weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from grace.backends.runtime import check_group
from grace.backends.torch_distributed import TorchBackend
from grace.core.api_names import REDUCE_SCATTER
from grace.core.compressor import Compressor, Ctx, Payload, Shape
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.layout import Layout
from grace.kernels import kernels_of
from grace.session import checkpoint, state_schema
from grace.session.by_hand import WholeTensorPlan
from grace.session.setup import build_step_runner
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner
from grace.torch.fsdp_layout import (
    ModuleLayout,
    all_gather_states,
    check_not_compressed,
    find_layouts,
    fsdp_param_groups,
    in_backward,
    subscribe_to_steps,
)
from grace.torch.gradient_hooks import not_compiled
from grace.torch.shard_group import ShardGroupState, build_method
from grace.torch.state_dict import move_to_devices


class SentWeights(Memory):
    """Memory of the weights that a rank sent last, in its own shard, for checkpoints: the differences that are sent are
    those to the copies, which :class:`AllGatherState` has."""

    name = "sent"
    noise_advice = "block(bits=4), or leave delta out"  # differences cannot do without this memory

    def keeps(self, shape: Shape) -> Shape:
        return shape


class AllGatherState(ShardGroupState):
    """The state of compressed all-gathers: with ``delta`` the weights of all ranks as they were sent last, in float32.

    A gather in a backward pass repeats the one before: it gives the same weights, and with ``delta`` sends nothing. A
    module that runs twice before its backward pass gets more exact weights in its second run with ``delta``, and
    backward has these for both runs.
    ``sent_bytes`` counts what leaves for the whole shard group; gathers over a part of it (``reshard_after_forward=n``)
    are torch's own.
    """

    def __init__(self, layouts: Sequence[ModuleLayout], runner: StepRunner, delta: bool, evaluation: bool):
        super().__init__(layouts, runner)
        self.delta = delta
        self.evaluation = evaluation
        self.exact = self.compressor.traits.exact
        self.group_name = layouts[0].mesh.get_group().group_name
        self.stepped = False
        """True if an optimizer has stepped since the last gather outside of a backward pass."""
        self.compressed: dict[str, bool] = {}
        """True if the last gather of a module outside of a backward pass was compressed, by module."""
        self.copies: dict[str, torch.Tensor] = {}
        """The weights that were sent last, by module: a row for each rank."""
        self.sizes = {layout.name: sizes_of(layout) for layout in layouts}
        """Number of elements of each parameter in a module's shard, by module."""
        params = [param.sharded_param for layout in layouts for param in layout.params]
        self.unhook = subscribe_to_steps(self, params)
        self.former_comms = [fsdp_param_groups(layout.module)[0]._all_gather_comm for layout in layouts]
        self.hooks = [
            layout.module.register_forward_pre_hook(partial(self._gather_anew, layout), prepend=True)
            for layout in layouts
        ]

    @not_compiled
    def _gather_anew(self, layout: ModuleLayout, *unused: object) -> None:
        """Let a module gather its weights anew where a forward pass without a backward pass has left others: decoded
        ones before an evaluation, exact ones before training."""
        compresses = self.evaluation or layout.module.training
        if self.compressed.get(layout.name, compresses) != compresses:
            layout.module.reshard()  # type: ignore[operator]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: an optimizer is about to change the weights."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that a step has ended, which the next gather counts, or a save. Called after an optimizer's step."""
        self.stepped = True

    def _count_step(self) -> None:
        """Count the last step, once. Random numbers of stochastic rounding follow the number, so that they stay until
        the end of a backward pass in which optimizers step."""
        self.context.step += self.stepped
        self.stepped = False

    def settle(self, saves: bool) -> None:
        """Let the memory hold this rank's rows of the copies, which checkpoints have."""
        self._count_step()
        for layout in self.layouts if saves else ():
            if layout.name in self.copies:
                row = self.copies[layout.name][self.backend.rank]
                for name, part in self._split(layout, row).items():
                    self.memory.state[name] = part.clone()
        self.memory.state.commit()

    def load_state_dict(self, given: dict[str, Any], memory: str = "strict") -> None:
        """Restore a result of :meth:`state_dict`, of the same rank of as many ranks: a run with ``delta`` then goes on
        bit for bit. Without a state the next gathers send whole weights once. :mod:`grace.session.checkpoint` documents
        the values of ``memory``. Every rank must call it.

        Raises:
            ConfigError: there is no state of this rank, or it is damaged, or of another method.
            RankError: another rank refused its state, or loads that of another save.
        """

        def read() -> SavedState | None:
            """Return the state to load for this rank."""
            own = self.own_entry(given)
            if own is None and memory != "reset":
                found = ", ".join(map(str, given)) if isinstance(given, dict) else "nothing"
                raise ConfigError(
                    f"this rank needs what {self.key} sent last, and there is {found or 'nothing'}: load nothing "
                    "instead, and the next all-gathers send whole weights once"
                )
            if own is not None:
                state_schema.check(own)
                self.check_choice(own, memory)
            return own

        device = self.layouts[0].params[0].sharded_param.device
        checkpoint.load(self.runner, read, memory, lambda saved: move_to_devices(saved, {}, device))
        self.stepped = False
        for layout in self.layouts:
            layout.module.reshard()  # a forward pass before may have left weights, which were gathered by other copies
        self.copies = {}
        known = self.backend.allgather_object(sorted(self.memory.state))
        everywhere = set.intersection(*map(set, known))  # with memory="keep" a rank may lack some
        for layout in self.layouts:
            names = self.sizes[layout.name]
            if names and everywhere >= names.keys():
                row = torch.cat([self.memory.state[name] for name in names])
                with self.backend.waiting_for_ranks(lambda: "the weights that were sent last"):
                    self.copies[layout.name] = torch.stack(self.backend.allgather(row).wait())

    def close(self) -> None:
        """End the compression: from now on all-gathers are torch's again."""
        if self.closed:  # a later compression may have taken its place
            return
        self.closed = True
        self.unhook()
        for hook in self.hooks:
            hook.remove()
        self.runner.close()
        for layout, former in zip(self.layouts, self.former_comms, strict=True):
            layout.module.set_custom_all_gather(former)

    def compresses(self, layout: ModuleLayout, shard: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Return True if a module's weights are gathered compressed, and False if by torch's own collective.

        Args:
            shard: the weights that this rank sends.
            group: the process group; not the whole shard group if weights are only gathered within nodes.
        """
        if not in_backward():
            self._count_step()
            self.compressed[layout.name] = self.evaluation or layout.module.training
        return (
            group.group_name == self.group_name
            and shard.element_size() > 1  # quantized already, or tensors of several dtypes as bytes
            and shard.is_floating_point()
            and shard.numel() == sum(self.sizes[layout.name].values())
            and self.compressed.get(layout.name, False)
        )

    @torch.no_grad()
    def gather(
        self, layout: ModuleLayout, shard: torch.Tensor, output: torch.Tensor, plainly: Callable[[], object]
    ) -> None:
        """Write the decoded weights of all ranks' shards into ``output``, of which ``shard`` may be a view.

        Args:
            plainly: gathers by torch's own collective.
        """
        rows = output.view(self.backend.size, -1)
        copies = self.copies.get(layout.name)
        if not self.delta:
            self._exchange(layout, shard, rows)
        elif copies is None:  # the first differences would be the weights
            plainly()
            self.sent_bytes += (self.backend.size - 1) * shard.nbytes
            if bool(kernels_of(output).all_finite(output)):
                self.copies[layout.name] = rows.float().clone()
        elif in_backward():
            rows.copy_(copies)
        else:
            self._exchange(layout, shard, rows, copies)

    def _exchange(
        self, layout: ModuleLayout, shard: torch.Tensor, rows: torch.Tensor, copies: torch.Tensor | None = None
    ) -> None:
        """Send this rank's shard compressed, and write what all ranks sent into the rows.

        Args:
            copies: the rows that were sent last, if their differences are sent; they are updated.
        """
        k = kernels_of(shard)
        finite = self.exact or bool(k.all_finite(shard))
        values = shard if self.exact else shard.float()
        if copies is not None:
            values = values - copies[self.backend.rank]
        if not finite:  # receivers fill the row with NaN, because its status is OVERFLOW
            values = torch.zeros_like(values)
        payloads: list[Payload] = []
        contexts = []
        for name, part in self._split(layout, values).items():  # blocks do not reach from one parameter into the next
            payload, ctx = self.compressor.compress(part, name)
            payloads.append(payload)
            contexts.append(ctx)
        if layout.name not in self.wires:
            wire = Layout.from_payloads(k, payloads, sums=False)
            self.wires[layout.name] = wire, torch.zeros(wire.length, dtype=torch.uint8, device=shard.device)
        wire, buffer = self.wires[layout.name]
        wire.pack(payloads, [self.status_of(layout.name, finite)] * len(payloads), out=buffer)
        self.sent_bytes += (self.backend.size - 1) * wire.length
        with self.backend.waiting_for_ranks(lambda: f"the all-gather of module {layout.name!r}"):
            arrived = self.backend.allgather(buffer).wait()
        # The shard may be a view of the rows: they are written only now.
        for sender, received in enumerate(arrived):
            if not self.is_finite(layout.name, received, self.backend, sender):
                rows[sender].fill_(torch.nan)
                continue
            base = None if copies is None else copies[sender]
            outs = self._split(layout, rows[sender] if base is None else base).values()
            for payload, ctx, out in zip(wire.unpack(received), contexts, outs, strict=True):
                known = base is not None
                out.copy_(self.compressor.accumulate(payload, ctx, out) if known else self._decode(payload, ctx))
            if base is not None:
                rows[sender].copy_(base)

    def _split(self, layout: ModuleLayout, shard: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the parameters in a module's shard."""
        sizes = self.sizes[layout.name]
        return dict(zip(sizes, shard.split(list(sizes.values())), strict=True))

    def _decode(self, payload: Payload, ctx: Ctx) -> torch.Tensor:
        """Return the weights that a payload holds."""
        decoded: torch.Tensor = self.compressor.decompress(payload, ctx)
        return decoded


def sizes_of(layout: ModuleLayout) -> dict[str, int]:
    """Return the number of elements of each parameter in a module's shard, padded; empty ones are left out."""
    pairs = zip(layout.names, layout.params, strict=True)
    sizes = {name: param.padded_sharded_param_size.numel() for name, param in pairs}
    return {name: size for name, size in sizes.items() if size}


class CompressedAllGather:
    """The ``AllGather`` that FSDP2 calls for one module. FSDP2's own class for it is private."""

    def __init__(self, layout: ModuleLayout, state: AllGatherState, former: Any):
        self.layout = layout
        self.grace_state = state
        self.former = former

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a buffer."""
        buffer: torch.Tensor = self.former.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self.grace_state.compresses(self.layout, input_tensor, group):
            return self.former(output_tensor, input_tensor, group, async_op)
        self.layout.check_not_replaced()
        self.grace_state.gather(
            self.layout, input_tensor, output_tensor, lambda: self.former(output_tensor, input_tensor, group)
        )
        return None


def compress_all_gather(
    model: torch.nn.Module,
    block: Spec | Compressor | None = None,
    *,
    delta: bool = False,
    evaluation: bool = False,
    seed: int = 0,
) -> AllGatherState:
    """Compress the all-gather of weights within the shard groups of a sharded model: two thirds of FSDP2's bytes.

    Each rank sends its shard as blocks of integers, each parameter's by themselves. All ranks, the sender too, compute
    with the decoded weights, bit for bit the same ones; the shards that the optimizer updates, ``state_dict()`` and
    checkpoints stay exact. With ``reshard_after_forward=n`` (the ranks of a node) the backward pass gathers over these
    ranks alone, what the forward pass has decoded, by torch's own collective. Tensors of one byte an element are left
    alone. A shard that is not finite arrives as NaN.

    With ``delta=True`` a rank sends the difference between its shard and what it sent last, so that 4 bits are as good
    as 8, and nothing at all in backward. It takes a whole copy of the model in float32 on every rank, which the first
    gather, of exact weights, makes. The state's ``state_dict()`` has this rank's part of it; a run that loads it goes
    on bit for bit.

    Sources: Wang et al., "ZeRO++", arXiv 2306.10209; of differences: Markov et al., arXiv 2302.02390, and EF21,
    arXiv 2106.05203.

    Args:
        model: a module that ``torch.distributed.fsdp.fully_shard`` was called on.
        block: the method: ``block``, or another one that may compress parts of a tensor alike; "block(bits=8)" if left
            out, and "block(bits=4)" of differences.
        delta: True to send differences.
        evaluation: True to compress where a module is in evaluation mode, too, which gets exact weights otherwise.
        seed: seed of the random numbers of stochastic methods; the same on all ranks.

    Returns:
        The state, with ``state_dict()``, ``load_state_dict()``, ``sent_bytes``, ``close()``.

    Raises:
        ConfigError: the arguments cannot work.
        RankError: the arguments of ranks of a shard group differ.

    Example::

        fully_shard(model)
        weights = grace.torch.compress_all_gather(model, "block(bits=8)")
        gradients = grace.torch.compress_reduce_scatter(model, "block(bits=4, hadamard=32)")
    """
    layouts = find_layouts(model, "compress_all_gather", other_axes=False)
    check_group(TorchBackend())
    backend = TorchBackend(layouts[0].mesh.get_group())
    context = Context(seed=seed, api_names=REDUCE_SCATTER)
    facts = [
        ("the weights of", "all-gathers"),
        ("delta", str(delta)),
        ("evaluation", str(evaluation)),
        *((f"module {layout.name!r}", ", ".join(layout.names)) for layout in layouts),
    ]
    chosen = block or ("block(bits=4)" if delta else "block(bits=8)")

    def variables() -> list[Variable]:
        """List the variables that are sent: each parameter's part in this rank's shard."""
        check_not_compressed(layouts, all_gather_states, "the all-gathers")
        devices = {name: str(param.sharded_param.device) for layout in layouts
                   for name, param in zip(layout.names, layout.params, strict=True)}  # fmt: skip
        sizes = {name: size for layout in layouts for name, size in sizes_of(layout).items()}
        return [Variable(name, (size,), device=devices[name]) for name, size in sizes.items()]

    def choose() -> WholeTensorPlan:
        """Return the plan, which has the method."""
        memory = SentWeights() if delta else "none"
        built = build_method(chosen, memory, backend.size, "compress_all_gather", "nothing is gathered")
        if delta and built.compressor.traits.exact:
            raise ConfigError("compress_all_gather: exact differences are no shorter than weights: leave delta out")
        return WholeTensorPlan(None, None, built)

    runner = build_step_runner(variables, choose, backend, context, facts)
    state = AllGatherState(layouts, runner, delta, evaluation)
    for layout, former in zip(layouts, state.former_comms, strict=True):
        layout.module.set_custom_all_gather(CompressedAllGather(layout, state, former))
    return state
