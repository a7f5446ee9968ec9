"""The search behind `furlong plan`, which is that of `furlong train`, and the plan of its batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from furlong.cli.planning.question import PlanSubject
from furlong.cost.machine import THIS_CPU
from furlong.cost.model import CostModel
from furlong.plan.lengths import count_lengths
from furlong.plan.plan import ChunkPlan, Layout
from furlong.planners.decide import FREE_RAM, Decision, decide, dials_in_words, division_in_words
from furlong.planners.options import ChunkOptions, dials_of
from furlong.planners.predict import one_draw
from furlong.planners.question import Answer
from furlong.planners.search import best_plan
from furlong.report.patience import Tell


@dataclass(frozen=True)
class Found:
    """The decision of a search, and the plan of the subject's batch."""

    decision: Decision
    answer: Answer
    method: str
    """Names of the planners of the batch's replicas."""
    plan: ChunkPlan
    model: CostModel

    def words(self) -> str:
        """The method, the layout and the dials."""
        return ", ".join([self.method, *self.layout_words(), dials_in_words(self.decision.options)])

    def layout_words(self) -> list[str]:
        layout = self.decision.layout
        return [division_in_words(layout, self.decision.stages)] * (layout.num_devices > 1)

    def to_json(self) -> dict[str, Any]:
        decision, answer = self.decision, self.answer
        next_best = [
            _plain(t.candidate.method, t.candidate.layout, t.candidate.options)
            | {"step_s": t.step_s}
            for t in answer.tried[1:2]
        ]
        return _plain(self.method, decision.layout, decision.options) | {
            "next_best": next_best[0] if next_best else None,
            "search": {
                "num_tried": len(answer.tried),
                "num_refused": len(answer.refused),
                "num_pruned": answer.num_pruned,
                "seconds": answer.seconds,
            },
        }


def _plain(method: str, layout: Layout, options: ChunkOptions) -> dict[str, Any]:
    return {"method": method, "layout": asdict(layout), "dials": dials_of(options)}


def find(subject: PlanSubject, method: str | None = None, tell: Tell | None = None) -> Found:
    """The decision of a run on the subject's devices, of one `method` or the subject's own.

    Raises ConfigError where no plan is predicted to fit.
    """
    question, batch = subject.question, subject.batch
    spec, words = question.model.hardware, "memory.device"
    if subject.config.memory.device == "auto":
        words = f"of one {spec.name}"
        if subject.runs_here and spec.name == THIS_CPU:
            count = question.num_devices
            words = FREE_RAM if count == 1 else f"{FREE_RAM} over {count} processes"
    decision = decide(
        batch.lengths or count_lengths(batch.seq_lens),
        sequences_per_step=len(batch.seq_lens),
        model=question.model,
        limits=question.limits,
        budget_words=words,
        num_devices=question.num_devices,
        seed=batch.seed,
        steps=None if subject.is_run else batch.seq_lens,
        given=question.given,
        method=method or question.method,
        must_fit=True,
        alone=subject.is_run,
        tell=tell,
    )
    answer, model = decision.answer, decision.model
    assert answer is not None and model is not None
    name, plan = best_plan(batch.seq_lens, answer)
    return Found(decision, answer, name, one_draw(plan, decision.options), model)
