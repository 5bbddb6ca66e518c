"""GraceCallback under the real Trainer: a tiny GPT on two ranks, stopped and resumed, and what is refused."""

import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import grace
from tests.support.frameworks import kept, messages, torchrun
from tests.support.pool import Ranks
from tests.support.training import digest

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

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


def stopped_and_resumed(folder: Path) -> list[Any]:
    """Digests of weights, and memories, of a run, of one resumed in its middle, and of another train()."""
    with torchrun():
        whole, own = trainer(folder, first := callback(), save_total_limit=2), []
        whole.train()
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-3", "checkpoint-6"]
        after = bits(whole), kept(first.state)
        logged = [entry for entry in whole.state.log_history if "grace_ratio" in entry]
        assert [entry["step"] for entry in logged] == [2, 4, 6]
        assert all(entry["grace_ratio"] > 2 and entry["grace_residual_norm"] > 0 for entry in logged)
        total = sum(entry["grace_bytes_sent"] for entry in logged)
        assert total == first.state.traffic.sent_bytes
        resumed = trainer(folder, second := callback(), model=gpt(seed=1), save_total_limit=2)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        assert (bits(resumed), kept(second.state)) == after
        steps = second.state.runner.context.step
        for again, memories in ((whole, first), (resumed, second)):
            gpt()  # the random numbers of dropout
            again.train()
            own.append((bits(again), kept(memories.state)))
        assert own[0] == own[1]
        assert second.state.runner.context.step == steps + 6  # it is the same hook
        return [after[0], own[0][0]]


def test_a_run_that_is_resumed_goes_on_bit_for_bit(two_ranks: Ranks, tmp_path: Path):
    one, other = two_ranks.run(stopped_and_resumed, tmp_path)
    assert one == other
    assert one[0] != one[1]


def losses(folder: Path) -> list[list[float]]:
    """Of two seeds each, uncompressed and compressed."""
    with torchrun():
        found: list[list[float]] = []
        for chosen in ([], ["block(bits=4)"]):
            found.append([])
            for seed in range(2):
                made = trainer(folder, *map(callback, chosen), model=gpt(seed), max_steps=24, save_strategy="no")
                made.train()
                found[-1].append(made.evaluate()["eval_loss"])
        return found


def test_the_loss_is_within_noise_of_the_uncompressed_one(two_ranks: Ranks, tmp_path: Path):
    (plain, compressed), other = two_ranks.run(losses, tmp_path)
    assert other == [plain, compressed]
    assert sum(compressed) / 2 < max(plain) + abs(plain[0] - plain[1])
    assert max(compressed) < 0.6 * math.log(32)  # which a model that knows nothing has


def misused(folder: Path) -> list[str]:
    """Messages of what must be refused, and what follows them must still work."""
    with torchrun():
        return list(messages(_misuses(folder)))


def _misuses(folder: Path) -> Any:
    def wrapping() -> None:
        model = gpt()
        optimizer = grace.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, TOPK)
        trainer(folder, model=model, optimizer=optimizer).train()

    def both() -> None:
        model = gpt()
        optimizer = grace.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, TOPK)
        trainer(folder, callback(), model=model, optimizer=optimizer).train()

    def momentum_twice() -> None:
        trainer(folder, callback("dgc(ratio=0.1)")).train()

    def without_memories() -> None:
        trainer(folder, max_steps=2, save_steps=1).train()
        trainer(folder, callback()).train(resume_from_checkpoint=str(folder / "checkpoint-1"))

    def damaged() -> None:
        trainer(folder, callback(), max_steps=2, save_steps=1).train()
        if grace.rank() == 1:
            file = folder / "checkpoint-1" / "grace_memories.pt"
            file.write_bytes(file.read_bytes()[:1000])
        grace.from_root(lambda: None)
        trainer(folder, callback()).train(resume_from_checkpoint=str(folder / "checkpoint-1"))

    def another_method() -> None:
        resumed = callback("block")
        trainer(folder, resumed).train(resume_from_checkpoint=str(folder / "checkpoint-2"))

    def another_step() -> None:
        one, two = (folder / f"checkpoint-{step}" / "grace_memories.pt" for step in (1, 2))
        grace.from_root(lambda: shutil.copy(two, one))
        trainer(folder, callback()).train(resume_from_checkpoint=str(folder / "checkpoint-1"))

    def another_optimizer() -> None:
        used = trainer(folder, callback(), max_steps=1)
        used.train()
        used.optimizer = None
        used.train()

    return [wrapping, both, momentum_twice, without_memories, damaged, another_method, another_step, another_optimizer]


WORDS = [
    ["is in a DistributedDataParallel model", "Trainer(..., callbacks=[grace.integrations.transformers.GraceCallback("],
    ["is a grace.DistributedOptimizer", "the plain one"],
    ["momentum"],
    ["saved by a plain optimizer", "GraceCallback(memory_state='reset')"],
    ["grace_memories.pt"],
    ["memory_state='keep'"],
    ["were saved at global_step 2, and the run is at 1", "GraceCallback", "memory_state='reset'"],
    ["another optimizer", "make a new Trainer"],
]


def test_what_cannot_work_is_refused_by_the_trainers_words(two_ranks: Ranks, tmp_path: Path):
    for found in two_ranks.run(misused, tmp_path):
        for message, words in zip(found, WORDS, strict=True):
            assert [word for word in words if word not in message] == [], message


def otherwise(folder: Path) -> None:
    """Settings beside the usual ones; each trains."""
    with torchrun():
        made = trainer(folder, follows := callback("efsignsgd"), max_steps=1)
        made.train()
        assert follows.state.optimizer is made.optimizer.optimizer  # efsignsgd follows its learning rate
        for choice in ("keep", "reset"):
            resumed = trainer(folder, callback(memory_state=choice), max_steps=2)
            if choice == "keep":
                with pytest.warns(UserWarning, match="this was dropped"):
                    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
            else:
                resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        made = trainer(folder, own := callback(), max_steps=1)
        made.model_init = lambda: gpt()  # a new model, and so a new hook, for each train()
        for _ in range(2):
            made.train()
            assert own.state.runner.context.step == 1
        compiled = trainer(folder, own := callback(), max_steps=2, torch_compile=True, torch_compile_backend="eager")
        compiled.train()
        assert not any("_orig_mod" in name for name in kept(own.state))


def test_learning_rates_compiled_models_and_other_memories(two_ranks: Ranks, tmp_path: Path):
    two_ranks.run(otherwise, tmp_path)
