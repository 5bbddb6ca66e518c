"""Schedules of torch.distributed.pipelining, by the names that plans have for them."""

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


def make_schedule(name: str, stages: Sequence[Any], microbatches: int, loss: Callable[[Any, Any], Any]) -> Any:
    """Return a schedule for a rank's stages, which leaves gradients as sums over micro-batches.

    Args:
        name: name of the schedule in a plan.
        stages: this rank's stages, in order.
        microbatches: number of micro-batches.
        loss: function of the last stage's output and a target.

    Raises:
        ConfigError: the schedule cannot run so many micro-batches.
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


def run_schedule(schedule: Any, stages: Sequence[Any], args: list[Any], targets: list[Any]) -> list[Any]:
    """Run forward and backward of all micro-batches. Return the losses, if this rank has the last stage.

    Args:
        schedule: the result of :func:`make_schedule`.
        stages: the stages that the schedule was made for.
        args: inputs of this rank's stages, by the stages' numbers, for each micro-batch.
        targets: the target for each micro-batch.
    """
    losses: list[Any] = []
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._internal_losses.clear()
    schedule._step_microbatches(args, None, targets, losses, return_outputs=False)
    return [loss.detach() for loss in losses]


def run_forward(stages: Sequence[Any], args: list[Any]) -> list[Any]:
    """Run forward of all micro-batches, without gradients. Return the outputs of the last stage, for each
    micro-batch."""
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
