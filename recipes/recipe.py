"""Says what to train and how to split it: the tree of configs that a run resolves to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from checkpoint import Retention
from models.config import ModelConfig
from models.layers.lora import LoraConfig
from models.registry import family_of
from parallel import ParallelConfig
from parallel.layout import check_layout, check_sequence_length, resolve
from parallel.schedules import check_micro_batches
from recipes.checks import check_integer, check_number
from recipes.data import DataConfig, check_vocabulary
from recipes.launchers import is_first_rank
from recipes.metrics import MetricsConfig
from recipes.optimizer import OptimizerConfig
from recipes.schedule import ScheduleConfig, check_schedule


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long to train and on how much at a time.

    Attributes:
        steps: Optimizer steps of the run, over which the learning rate is scheduled.
        init_from: Start from the weights of another run, as fine-tuning does: a checkpoint of the same model from any
            mesh, a folder of checkpoints or of a run, of which the newest is taken, or a Hugging Face folder.
            Optimizer, schedule, data and step start afresh. A run that has a checkpoint of its own resumes from that.
            None: from initial values.
        stop_at: Save and stop after this step; the same command without it goes on. None: at the end.
        global_batch: Sequences of one step, over all ranks.
        micro_batch: Sequences that one rank runs through the model at a time.
        max_gradient_norm: Gradients are scaled down to this global norm; None measures it only.
        seed: Seed of the initial parameters.
        stored_dtype: Type in which parameters and optimizer state are kept.
        evaluate_every: Optimizer steps between evaluations on held-out text, beside the one at the end; 0: only that.
        evaluation_sequences: Held-out sequences of an evaluation; 0 takes all.
    """

    steps: int
    init_from: str | None = None
    stop_at: int | None = None
    global_batch: int = 32
    micro_batch: int = 8
    max_gradient_norm: float | None = 1.0
    seed: int = 0
    stored_dtype: Literal["float32", "float64"] = "float32"
    evaluate_every: int = 100
    evaluation_sequences: int = 256

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        for name in ("steps", "global_batch", "micro_batch"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("seed", "evaluate_every", "evaluation_sequences"):
            check_integer(name, getattr(self, name), minimum=0)
        if self.init_from is not None and not self.init_from.strip():
            raise ValueError("init_from is empty; name a checkpoint, or leave it out")
        if self.stop_at is not None:
            check_integer("stop_at", self.stop_at, minimum=1)
        if self.max_gradient_norm is not None:
            check_number("max_gradient_norm", self.max_gradient_norm, above=0)
        if self.stored_dtype not in ("float32", "float64"):
            raise ValueError(f"unknown stored_dtype {self.stored_dtype!r}; legal: float32, float64")

    def num_micro_batches(self, dp_degree: int) -> int:
        """Micro-batches of a step on each rank.

        Args:
            dp_degree: Data-parallel ranks that share the global batch.
        """
        return -(-self.global_batch // (dp_degree * self.micro_batch))

    @property
    def last_step(self) -> int:
        """The step after which the run stops."""
        return min(self.steps, self.stop_at or self.steps)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What a run leaves behind, and where.

    Attributes:
        folder: Folder of the run: checkpoints/ and metrics.jsonl. A run resumes from the newest checkpoint in it.
        save_every: Optimizer steps between checkpoints, beside the one at the end; 0: only that.
        save_in_background: Train on while a checkpoint is written, from a copy in host memory of what this rank saves.
        on_failed_save: `stop` the run, or `continue` with a warning where the file system fails; at the end of the run
            a failed save is an error in any case.
        keep: Newest checkpoints that are kept, beside those that hold a file named `protected`; 0 keeps all.
        keep_every: Checkpoints of steps that are multiples of this are kept too; 0: of none.
        log_every: Optimizer steps between lines on the console.
        adapters_only: Save of the model its adapters alone; their base stays where `training.init_from` found it, and
            checkpoints say where that is.
    """

    folder: str
    save_every: int = 100
    save_in_background: bool = False
    on_failed_save: Literal["stop", "continue"] = "stop"
    keep: int = 2
    keep_every: int = 0
    log_every: int = 10
    adapters_only: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        for name in ("save_every", "keep", "keep_every"):
            check_integer(name, getattr(self, name), minimum=0)
        check_integer("log_every", self.log_every, minimum=1)
        if self.on_failed_save not in ("stop", "continue"):
            raise ValueError(f"unknown on_failed_save {self.on_failed_save!r}; legal: stop, continue")
        if not self.folder.strip():
            raise ValueError("output folder is empty; name a folder for checkpoints and metrics")

    @property
    def retention(self) -> Retention | None:
        """Which checkpoints stay when a new one is there; None: all."""
        return Retention(last=self.keep, every=self.keep_every or None) if self.keep else None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return Path(self.folder) / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Where the lines of metrics go."""
        return Path(self.folder) / "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train and how to split it.

    Attributes:
        name: Name of the recipe.
        model: Shape of the model.
        lora: Adapters that are trained in place of the model.
        parallel: How it is split over ranks.
        data: Text, and how it is cut and ordered.
        optimizer: AdamW.
        schedule: Learning rate over the run.
        training: How long, and how much at a time.
        output: What the run leaves behind.
        metrics: How utilization is counted, and where metrics go beside that.
    """

    name: str
    model: ModelConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig
    output: OutputConfig
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def check(self, world_size: int) -> None:
        """Checks all that can be known before a rank starts.

        Args:
            world_size: Ranks of the job.

        Raises:
            ValueError: If the recipe cannot run on that many ranks.
        """
        self.check_step(world_size)
        check_vocabulary(self.data, self.model.shape.vocab_size)
        if is_first_rank():
            self.metrics.check_installed()

    def check_layout(self, world_size: int) -> None:
        """Checks all that needs neither a rank nor a file.

        Args:
            world_size: Ranks of the job.

        Raises:
            ValueError: If the recipe contradicts itself or does not fit that many ranks.
        """
        resolved = resolve(self.parallel, world_size)
        check_layout(resolved, self.model.shape)
        check_sequence_length(resolved, self.data.sequence_length, self.model.shape)
        self._check_adapters_only()
        check_schedule(self.schedule, self.training.steps)

    def check_step(self, world_size: int) -> None:
        """Checks the layout, and that a step has as many micro-batches as its schedule runs.

        Args:
            world_size: Ranks of the job.

        Raises:
            ValueError: If the recipe contradicts itself or does not fit that many ranks.
        """
        self.check_layout(world_size)
        resolved = resolve(self.parallel, world_size)
        ranks = resolved.dp_replicate * resolved.dp_shard
        check_micro_batches(resolved, self.training.num_micro_batches(ranks))

    def _check_adapters_only(self) -> None:
        if self.output.adapters_only and not (self.lora.rank and self.training.init_from):
            raise ValueError(
                f"output.adapters_only=True needs adapters and a base that is kept elsewhere; lora.rank is "
                f"{self.lora.rank} and training.init_from is {self.training.init_from}: set both, or save all"
            )

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON can hold it; the model's config with the name of its family."""
        values = asdict(self)
        return values | {"model": {"family": family_of(self.model).name} | values["model"]}


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Fields that differ between two recipes or parts of one, as `training.steps 300 -> 6`.

    Args:
        before: What `Recipe.to_json` gave of one, or a part of it.
        now: The same of the other.
        prefix: What the names of fields start with.
    """
    changes: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        one, other = before.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            changes += changed_fields(one, other, f"{prefix}{name}.")
        elif one != other and not (isinstance(one, tuple | list) and list(one) == list(other or ())):
            changes.append(f"{prefix}{name} {one} -> {other}")
    return changes
