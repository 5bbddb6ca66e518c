"""The schedules of torch.distributed.pipelining, by the names that plans have for them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import pipelining

from grace.errors import ConfigError

SINGLE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
SEVERAL = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


def schedule_of(name: str, stages: Sequence[Any], microbatches: int, loss: Callable[[Any, Any], Any]) -> Any:
    """A schedule for a rank's stages, which leaves gradients as sums over micro-batches.

    Args:
        name: as in a plan.
        stages: this rank's, in order.
        microbatches: how many.
        loss: of the last stage's output and a target.

    Raises:
        ConfigError: it cannot run as many micro-batches.
    """
    try:
        if name in SINGLE:
            (stage,) = stages
            return SINGLE[name](stage, microbatches, loss_fn=loss, scale_grads=False)
        return SEVERAL[name](list(stages), microbatches, loss_fn=loss, scale_grads=False)
    except ValueError as error:
        raise ConfigError(
            f"schedule {name!r} cannot run {microbatches} micro-batches over {stages[0].num_stages} stages: {error} "
            "Choose another number of micro-batches, or schedule='gpipe'"
        ) from error


def run(schedule: Any, stages: Sequence[Any], args: list[Any], targets: list[Any]) -> list[Any]:
    """Forward and backward of all micro-batches; the losses of this rank, if it has the last stage.

    Args:
        schedule: from :func:`schedule_of`.
        stages: which it was made for.
        args: for each micro-batch the inputs of this rank's stages, by their numbers.
        targets: for each micro-batch.
    """
    losses: list[Any] = []
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._internal_losses.clear()
    schedule._step_microbatches(args, None, targets, losses, return_outputs=False)
    return [loss.detach() for loss in losses]


def forward(stages: Sequence[Any], args: list[Any]) -> list[Any]:
    """Forward alone, without gradients; the outputs of the last stage, for each micro-batch."""
    for stage in stages:
        stage.has_backward = False
        stage.clear_runtime_states()
    sent = []
    for i, stage in enumerate(stages):
        follows = i > 0 and stages[i - 1].stage_index == stage.stage_index - 1
        precedes = i + 1 < len(stages) and stages[i + 1].stage_index == stage.stage_index + 1
        for chunk, own in enumerate(args):
            if not follows:
                for op in stage.get_fwd_recv_ops(chunk):
                    op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer).wait()
            outputs = stage.forward_one_chunk(chunk, own)
            if precedes:
                stages[i + 1].set_local_fwd_input(outputs, chunk)
            else:
                ops = stage.get_fwd_send_ops(chunk)
                sent += [op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]
    for work in sent:
        work.wait()
    return list(stages[-1].output_chunks) if stages[-1].is_last else []
