"""GraceCallback under the real Trainer: a tiny GPT on two ranks, stopped and resumed, and what is refused."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import grace
from tests.support.frameworks import OUTER, Recorded, check_refused, kept, torchrun
from tests.support.frameworks import bits as parameter_bits
from tests.support.pools import on_ranks
from tests.support.training import digest

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

TOPK = "topk(ratio=0.1)"


def gpt(seed: int = 0) -> Any:
    """Random start values; dropout, whose random numbers a resumed run must go on with."""
    import transformers

    transformers.set_seed(seed)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, **ends)
    return transformers.GPT2LMHeadModel(config)


def sentences() -> list[dict[str, torch.Tensor]]:
    """Numbers that go up by 3."""
    starts = torch.randint(32, (64,), generator=torch.Generator().manual_seed(0))
    ids = [(start + 3 * torch.arange(16)) % 32 for start in starts]
    return [{"input_ids": own, "labels": own} for own in ids]


def trainer(folder: Path, *callbacks: Any, model: Any = None, optimizer: Any = None, **arguments: Any) -> Any:
    """One that accumulates two batches, clips, evaluates and saves on the way."""
    import transformers

    given = {
        "max_steps": 6,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 2,
        **arguments,
    }
    settings = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        max_grad_norm=1.0,
        ddp_find_unused_parameters=False,
        **given,
    )
    made = transformers.Trainer(
        model or gpt(),
        settings,
        train_dataset=sentences(),
        eval_dataset=sentences()[:8],
        callbacks=list(callbacks),
        optimizers=(optimizer, None),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def callback(compressor: str = TOPK, **choices: Any) -> Any:
    from grace.integrations.transformers import GraceCallback

    return GraceCallback(compressor, **choices)


def bits(made: Any) -> str:
    return digest(dict(made.model.state_dict()))


@on_ranks(2)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path):
    """A run, one resumed in its middle, and another train() of both."""
    with torchrun():
        whole, own = trainer(tmp_path, first := callback(), save_total_limit=2), []
        whole.train()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]
        after = bits(whole), kept(first.state)
        logged = [entry for entry in whole.state.log_history if "grace_ratio" in entry]
        assert [entry["step"] for entry in logged] == [2, 4, 6]
        assert all(entry["grace_ratio"] > 2 and entry["grace_residual_norm"] > 0 for entry in logged)
        total = sum(entry["grace_bytes_sent"] for entry in logged)
        assert total == first.state.traffic.sent_bytes
        resumed = trainer(tmp_path, second := callback(), model=gpt(seed=1), save_total_limit=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert (bits(resumed), kept(second.state)) == after
        steps = second.state.runner.context.step
        for again, memories in ((whole, first), (resumed, second)):
            gpt()  # the random numbers of dropout
            again.train()
            own.append((bits(again), kept(memories.state)))
        assert own[0] == own[1]
        assert second.state.runner.context.step == steps + 6  # it is the same hook
        one = [after[0], own[0][0]]
        assert one[0] != one[1]
        return one


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@on_ranks(2)
def test_ranks_that_train_alone_go_the_way_of_the_loop_by_hand(tmp_path):
    """Eight steps, a period of three, evaluated after each second and saved after each fourth; one is resumed."""

    def run(folder: Path, model: Any, **options: Any) -> tuple[Any, Any]:
        optimizer = adamw(model)
        recorded = Recorded(model, optimizer)
        made = trainer(folder, own := callback(**OUTER), model=model, optimizer=optimizer, max_steps=8, save_steps=4)
        made.train(**options)
        return (parameter_bits(model), kept(own.state)), recorded

    with torchrun():
        whole, recorded = run(tmp_path, gpt())
        resumed, _ = run(tmp_path, gpt(seed=1), resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert resumed == whole
        hand = gpt()
        assert recorded.by_hand(hand, adamw(hand), **OUTER) == whole[0]
        saved = type(hand).from_pretrained(tmp_path / "checkpoint-4")
        assert parameter_bits(saved) == recorded.evaluated[4]
        return whole[0]


@on_ranks(2)
def test_training_goes_on_from_the_best_parameters(tmp_path):
    """The first evaluation's are the best, since the loss is said to rise; the last round leaves them alone."""
    with torchrun():
        model = gpt()
        best = {"load_best_model_at_end": True, "save_steps": 2, "save_total_limit": 1}
        made = trainer(tmp_path, own := callback(**OUTER), model=model, max_steps=6, **best)
        losses = iter(range(100))
        made.add_callback(rising(losses))
        made.train()
        saved = type(model).from_pretrained(tmp_path / "checkpoint-2")
        assert parameter_bits(model) == parameter_bits(saved)
        made.train()
        return parameter_bits(model), own.state.traffic.steps


@on_ranks(2)
def test_the_last_round_takes_what_another_callback_sets_at_the_end(tmp_path):
    """An average of the rank's own weights, say, of a callback that was given after Grace's."""
    import transformers

    class Average(transformers.TrainerCallback):
        def on_train_end(self, args, state, control, model, **kwargs):
            for p in model.parameters():
                p.data.fill_(1.0 + 2 * grace.rank())

    best = {"load_best_model_at_end": True, "save_steps": 2}
    with torchrun():
        for choices in ({}, best):
            model = gpt()
            trainer(tmp_path, callback(None, outer="none", period=5), Average(), model=model, **choices).train()
            assert all(torch.allclose(p.detach(), torch.tensor(2.0)) for p in model.parameters())
        return parameter_bits(model)


def rising(losses: Any) -> Any:
    import transformers

    class Rising(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_loss"] = float(next(losses))

    return Rising()


@on_ranks()
def test_what_cannot_work_is_refused_by_the_trainers_words(tmp_path: Path):
    def wrapping() -> None:
        model = gpt()
        optimizer = grace.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, TOPK)
        trainer(tmp_path, model=model, optimizer=optimizer).train()

    def both() -> None:
        model = gpt()
        optimizer = grace.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, TOPK)
        trainer(tmp_path, callback(), model=model, optimizer=optimizer).train()

    def momentum_twice() -> None:
        trainer(tmp_path, callback("dgc(ratio=0.1)")).train()

    def without_memories() -> None:
        trainer(tmp_path, max_steps=2, save_steps=1).train()
        trainer(tmp_path, callback()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    def damaged() -> None:
        trainer(tmp_path, callback(), max_steps=2, save_steps=1).train()
        if grace.rank() == 1:
            file = tmp_path / "checkpoint-1" / "grace_memories.pt"
            file.write_bytes(file.read_bytes()[:1000])
        grace.from_root(lambda: None)
        trainer(tmp_path, callback()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    def another_method() -> None:
        resumed = callback("block")
        trainer(tmp_path, resumed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    def another_step() -> None:
        one, two = (tmp_path / f"checkpoint-{step}" / "grace_memories.pt" for step in (1, 2))
        grace.from_root(lambda: shutil.copy(two, one))
        trainer(tmp_path, callback()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    def another_optimizer() -> None:
        used = trainer(tmp_path, callback(), max_steps=1)
        used.train()
        used.optimizer = None
        used.train()

    reset = "GraceCallback(memory_state='reset')"
    misuses = {
        wrapping: ["is in a DistributedDataParallel model", "Trainer(..., callbacks=[", "transformers.GraceCallback("],
        both: ["is a grace.DistributedOptimizer", "the plain one"],
        momentum_twice: ["momentum"],
        without_memories: ["saved by a plain optimizer", reset],
        damaged: ["grace_memories.pt"],
        another_method: ["memory_state='keep'"],
        another_step: ["were saved at global_step 2, and the run is at 1", "GraceCallback", "memory_state='reset'"],
        another_optimizer: ["another optimizer", "make a new Trainer"],
    }
    with torchrun():
        check_refused(misuses)


class Small(torch.nn.Module):
    """A model that is compiled in little time."""

    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)

    def forward(self, input_ids, labels):
        logits = self.head(self.words(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@on_ranks(2)
def test_learning_rates_compiled_models_and_other_memories(tmp_path):
    """Settings beside the usual ones; each trains."""
    with torchrun():
        made = trainer(tmp_path, follows := callback("efsignsgd"), max_steps=1)
        made.train()
        assert follows.state.optimizer is made.optimizer.optimizer  # efsignsgd follows its learning rate
        for choice in ("keep", "reset"):
            resumed = trainer(tmp_path, callback(memory_state=choice), max_steps=2)
            if choice == "keep":
                with pytest.warns(UserWarning, match="this was dropped"):
                    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
            else:
                resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        made = trainer(tmp_path, own := callback(), max_steps=1)
        made.model_init = lambda: gpt()  # a new model, and so a new hook, for each train()
        for _ in range(2):
            made.train()
            assert own.state.runner.context.step == 1
        compiling = {"torch_compile": True, "torch_compile_backend": "eager"}
        compiled = trainer(tmp_path, own := callback(), model=Small(), max_steps=2, **compiling)
        compiled.train()
        assert not any("_orig_mod" in name for name in kept(own.state))


@on_ranks(2)
def test_training_alone_goes_on_after_errors(tmp_path):
    """Memory is short at first, so that the Trainer wraps the model anew; then the program fails behind backward."""
    import transformers

    class Failing(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if errors and state.global_step == 4:
                raise errors.pop()

    with torchrun():
        errors: list[Exception] = [KeyError("behind backward"), RuntimeError("CUDA out of memory.")]
        made = trainer(tmp_path, callback(**OUTER), Failing(), auto_find_batch_size=True, save_strategy="no")
        with pytest.raises(KeyError, match="behind backward"):
            made.train()
        assert made.state.global_step == 4
        made.evaluate()
        made.save_model()
        grace.barrier()
        shared = parameter_bits(type(made.model).from_pretrained(tmp_path))
        assert shared != parameter_bits(made.model)
        made.train()
        return shared, parameter_bits(made.model)
