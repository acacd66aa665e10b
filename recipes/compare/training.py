"""A recipe in training, one step at a time: plain, under a meter of memory, or recorded."""

from torch.optim import Optimizer

from checkpoint.ranks import Ranks
from parallel import Batch, Mesh, Trained, materialize
from parallel.ledger.live import LiveBytes, LiveMeter
from parallel.ledger.parts import ModelParts, model_parts
from parallel.ledger.states import Moments
from parallel.ledger.term import Term
from parallel.ledger.timeline import StepRecorder, Timeline
from parallel.ledger.traffic import StepShape, predict_traffic
from recipes.data import DataStream, load_dataset
from recipes.model import build_model, whole_model
from recipes.optimizer import adamw_factory
from recipes.recipe import Recipe
from recipes.schedule import Schedule


class Run:
    """A recipe in training.

    Attributes:
        losses: Loss of each step so far.
        parts: The model in its layout, of which predictions follow.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh, ranks: Ranks) -> None:
        """Builds all that training needs; every rank calls this.

        Args:
            recipe: With its layout.
            mesh: Of that layout.
            ranks: All ranks.

        Raises:
            ValueError: On every rank, if the recipe does not fit the ranks or the data.
        """
        training = recipe.training
        self.recipe, self.losses = recipe, list[float]()
        self.trained: Trained = build_model(recipe, mesh)
        text = ranks.together("read the text", lambda: load_dataset(recipe.data))
        materialize(self.trained, seed=training.seed)
        self.parts: ModelParts = model_parts(
            whole_model(recipe), self.trained.config, self.trained.plan, mesh.coordinate("pp")
        )
        self.optimizer: Optimizer = self.trained.build_optimizer(
            adamw_factory(recipe.optimizer.at_batch(training.global_batch))
        )
        self.schedule = Schedule(self.optimizer, recipe.schedule, training.steps)
        self.stream = DataStream(
            text.train,
            global_batch=training.global_batch,
            micro_batch=training.micro_batch,
            dp_rank=mesh.coordinate("dp"),
            dp_degree=mesh.degree("dp"),
            seed=recipe.data.seed,
        )

    def step(self) -> None:
        """One step as training takes it."""
        self._gradients(self.stream.next_step())
        self.trained.clip_gradients(self.recipe.training.max_gradient_norm)
        self._update()

    def step_under_meter(self) -> Moments:
        """One step, and what this rank holds at three moments of it."""
        self.optimizer.zero_grad()
        meter = LiveMeter(self.trained, self.optimizer)
        seen: list[LiveBytes] = [meter.measure()]
        hook = self.trained.model.register_forward_hook(lambda *_: seen.append(meter.measure()))
        self._gradients(self.stream.next_step())
        hook.remove()
        moments = Moments(rest=seen[0], after_forward=seen[1], after_backward=meter.measure())
        self.trained.clip_gradients(self.recipe.training.max_gradient_norm)
        self._update()
        return moments

    def recorded_step(self) -> tuple[Timeline, tuple[Term, ...]]:
        """What one step did, and what it was predicted to send."""
        micro_batches = self.stream.next_step()
        shape = StepShape(
            num_micro_batches=len(micro_batches),
            num_tokens=sum(each.tokens.numel() for each in micro_batches),
            clips=True,
            num_rows=sum(len(each.tokens) for each in micro_batches),
        )
        places = (self.trained.mesh.coordinate(view) for view in ("tp", "fsdp"))
        predicted = predict_traffic(self.parts, shape, *places)
        recorder = StepRecorder(self.trained)
        with recorder:
            self._gradients(micro_batches)
            with recorder.part("clip"):
                self.trained.clip_gradients(self.recipe.training.max_gradient_norm)
            with recorder.part("optimizer"):
                self._update()
        return recorder.timeline(), predicted

    def _gradients(self, micro_batches: list[Batch]) -> None:
        self.losses.append(self.trained.forward_backward(micro_batches).loss)

    def _update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
