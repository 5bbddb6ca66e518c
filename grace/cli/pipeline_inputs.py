"""What ``grace pipeline`` plans for: a profile's graph, or a model's."""

from pathlib import Path
from typing import Any

from rich.console import Console

from grace.cli.model_variables import made_by
from grace.errors import ConfigError
from grace.pipeline.planning import profiles
from grace.pipeline.planning.graph import Graph


def graph_of(profile: Path | None, model: str | None, dry: bool = False) -> Graph:
    """The model that is meant.

    Args:
        profile: a file of its times.
        model: ``module:function``, which makes (model, example inputs).
        dry: do not run the model.

    Raises:
        ConfigError: none is named, or both are; there is no such model; or it cannot be cut.
    """
    if (profile is None) == (model is None):
        raise ConfigError("say which model, in one way: --model module:function, or --profile FILE.json")
    if profile is not None:
        if dry:
            raise ConfigError("--dry is for --model: a profile has its times")
        return profiles.read(profile)
    assert model is not None
    made: Any = made_by(model)
    if not isinstance(made, tuple) or len(made) != 2 or callable(made[1]):
        raise ConfigError(
            f"{model} must make (model, example inputs): a torch module, and a tensor, a tuple of arguments, or (tuple "
            f"of arguments, dict of keywords); it makes {_kind(made)}"
        )
    from grace.pipeline.torch import dry_run as without_ranks

    doing = "Estimating" if dry else "Measuring"
    with Console(stderr=True).status(f"{doing} what the parts of {model} take"):
        return without_ranks.build_graph(*made, dry=dry)


def versions_of(model: str | None) -> dict[str, Any]:
    """What a plan is of, besides Grace's own: torch's version, if the model was captured with it."""
    if model is None:
        return {}
    import torch

    from grace.session.versions import public

    return {"torch": public(torch.__version__)}


def _kind(made: Any) -> str:
    return f"({', '.join(type(one).__name__ for one in made)})" if isinstance(made, tuple) else type(made).__name__
