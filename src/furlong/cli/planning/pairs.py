"""`furlong plan` of a run on pairs: the plan of one call, which takes a pair in two phases."""

from __future__ import annotations

import json

from furlong.cli.flag_types import refusal
from furlong.cli.planning.files import draw, writing
from furlong.cli.planning.subject import PlanSubject
from furlong.config.sources import RunFlags
from furlong.plan.text import save_plan
from furlong.planners.auto.pairs import check_dials, decide_pairs
from furlong.planners.auto.words import dials_in_words
from furlong.planners.options import dials_of
from furlong.planners.orders import plan_two_phases
from furlong.planners.question import Limits
from furlong.report.report import report_plan
from furlong.report.text import format_report, line, runs_words
from furlong.units import format_bytes


def run(flags: RunFlags, subject: PlanSubject) -> None:
    """Search, print, save and draw the plan of the longest pair. Raises ConfigError."""
    chosen, problem, config = flags.own, subject.problem, subject.config
    require_one_pair(flags, subject)
    check_dials(config.chunks)
    budget_bytes = problem.budget_bytes or problem.model.hardware.budget_bytes
    budgets = Limits(budget_bytes, subject.host_bytes, subject.disk_bytes, problem.margin)
    first, second = problem.seq_lens
    decision = decide_pairs(
        [(first, second)], model=problem.model, budgets=budgets,
        budget_words="memory.device" if problem.budget_bytes else problem.model.hardware.name,
        dials=subject.dials,
    )  # fmt: skip
    if decision is None:
        raise refusal(
            f"a pair of {first:,} tokens each, of which no plan fits",
            "what both keep between forward and backward, within"
            f" {format_bytes(budgets.limit_bytes)}",
            "raise memory.device, set chunks.keep: input, lower data.max_seq_len, or use LoRA",
            "the search over plans in two phases",
        )
    options = decision.options
    plan = plan_two_phases((first, second), options, num_layers=problem.model.shape.num_layers)
    report = report_plan(plan, problem.model, problem.budget_bytes, first + second, num_processes=1)
    if chosen.json:
        own = {"method": "two phases", "dials": dials_of(options), "auto": decision.words}
        print(json.dumps(subject.to_json() | own | report.to_json(), indent=1))
    else:
        print(subject.words())
        print(line("plan", f"two phases, {dials_in_words(options)}"))
        print(format_report(report))
        print(line("runs here", runs_words(report, problem.model.hardware.name)))
        print(line("auto", decision.words))
    if chosen.out is not None:
        with writing(chosen.out):
            text = save_plan(plan, subject.made_for(problem.model))
            chosen.out.write_text(text, encoding="utf-8")
        if not chosen.json:
            print(f"wrote {chosen.out}")
    draw([report.panel("two phases", dials_in_words(options))], chosen)


def require_one_pair(flags: RunFlags, subject: PlanSubject) -> None:
    """Raise ConfigError for training on pairs, asked for more than one pair on one device."""
    if subject.config.train.loss == "sft":
        return
    own, count = flags.own, subject.problem.num_devices
    for given in (
        f"{count} devices" if count > 1 else "", own.compare and "--compare",
        own.method and f"--method {own.method}", own.sequences and f"--sequences {own.sequences}",
    ):  # fmt: skip
        if given:
            raise refusal(
                f"{given} with train.loss: dpo",
                "one device, and one pair: each call of a step takes a pair in two phases",
                "leave it out, or plan with --train.loss=sft",
            )
