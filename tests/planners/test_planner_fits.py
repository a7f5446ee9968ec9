"""Limits of host and disk by a run's keys, and what is said where a plan does not fit."""

import pytest

from furlong.config.sources import parse_run
from furlong.cost.lengths import draw_with_longest
from furlong.cost.machine import THIS_CPU, Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.plan.lengths import StepSize, count_lengths
from furlong.plan.plan import Offload
from furlong.planners.decide import decide
from furlong.planners.question import Limits, Question, advice
from furlong.planners.refusals import nothing_fits
from furlong.planners.search import search
from furlong.planners.setup import cost_model_of, given_options, offload_budgets
from furlong.simulate.predict import most_of, needs_of

GIB = 2**30


@pytest.mark.parametrize(
    ("offload", "cpu", "disk", "on_cpu", "expected"),
    [
        (None, "auto", 0, True, (0, 0)),
        ("auto", 0, 5, True, (0, 5)),
        ("disk", "auto", 5, True, (0, 5)),
        (None, "auto", 0, False, (7, 0)),
        ("cpu", "auto", 0, False, (7, 0)),
        ({"kv": "cpu", "inputs": "disk"}, 3, 5, False, (3, 5)),
        (Offload(graphs="disk"), 0, 5, False, (0, 5)),
        ({"weights": "cpu"}, 3, 0, False, (3, 0)),
        ({"weights": "cpu"}, "auto", 0, True, (0, 0)),
    ],
)
def test_what_the_keys_give(offload, cpu, disk, on_cpu, expected):
    assert offload_budgets(offload, cpu, disk, on_cpu=on_cpu, free_cpu_bytes=7) == expected


@pytest.mark.parametrize(
    ("flag", "kept", "away"),
    [
        ("auto", None, None),
        ("cpu", "cpu", False),
        ("none", "none", False),
        ("{kv: cpu}", {"kv": "cpu"}, False),
        ("{weights: cpu}", None, True),
        ("{weights: none}", "none", False),
        ("{weights: cpu, kv: disk}", {"kv": "disk"}, True),
    ],
)
def test_weights_are_no_kept_tensors(flag, kept, away):
    """Alone they leave the others to auto, and one word means kept tensors alone."""
    needed = ["--model.name=folder", "--data.train=a.jsonl", "--memory.disk=1GiB"]
    config = parse_run([*needed, f"--offload={flag}"])
    given = given_options(config)
    assert (given.get("offload"), given.get("reshard")) == (kept, True if away else None)
    card, shape = Machine.named("H100"), model_shape("Qwen2.5-0.5B")
    assert cost_model_of(config, shape, card).training.offload_weights is away
    other = parse_run([*needed, "--train.optimizer=adamw_8bit"])
    assert cost_model_of(other, shape, card).training.offload_weights is False


def test_cpu_memory_that_is_not_known_has_no_limit():
    assert offload_budgets(None, "auto", 0, on_cpu=False) == (None, 0)


@pytest.mark.parametrize(
    ("offload", "cpu", "disk", "on_cpu", "given", "change"),
    [
        (None, 24 * GIB, 0, True, "memory.cpu = ", "remove memory.cpu"),
        ("cpu", "auto", 0, True, "offload = cpu on", "remove offload"),
        ({"kv": "cpu"}, 0, 0, True, "offload = {kv: cpu}", "remove offload"),
        ("disk", "auto", 0, True, "disk with memory.disk = 0", "add memory.disk"),
        ({"inputs": "disk"}, "auto", 0, False, "disk with memory.disk = 0", "add memory.disk"),
        ("cpu", 0, 0, False, "cpu with memory.cpu = 0", "add memory.cpu"),
        ({"weights": "cpu"}, 0, 0, False, "cpu with memory.cpu = 0", "add memory.cpu"),
    ],
)
def test_what_cannot_be_is_told_in_four_parts(offload, cpu, disk, on_cpu, given, change):
    with pytest.raises(ConfigError) as caught:
        offload_budgets(offload, cpu, disk, on_cpu=on_cpu, free_cpu_bytes=7)
    assert given in caught.value.given
    assert change in caught.value.change
    assert caught.value.required and caught.value.source


LESS = Training(lora=Lora(8))


@pytest.mark.parametrize(
    ("part", "training", "num_devices", "given", "alone", "told"),
    [
        ("buffers", LESS, 64, ["size"], False, "use more devices, leave chunks.size out"),
        ("buffers", LESS, 64, [], True, "give it a larger memory.device, or use a smaller model"),
        ("kv", LESS, 1, [], False, "use several devices, use shorter sequences"),
        ("activations", LESS, 1, ["num_retained"], True, "leave chunks.num_retained out"),
        ("state", Training(), 1, ["size"], False, "which share the state (ZeRO), train LoRA"),
    ],
)
def test_advice_names_no_dial_that_was_tried(part, training, num_devices, given, alone, told):
    words = advice(part, training, num_devices, given, alone=alone)
    assert told in words and words.endswith(", or use a smaller model")
    assert ("chunks." in words) == (told.count("chunk") > 0)


@pytest.mark.parametrize(
    ("card", "gib", "preset", "count", "most"),
    [
        pytest.param("H100", 72, "github", 32, 65_536, marks=pytest.mark.nightly),
        ("A100-80", 72, "lmsys-chunkflow", 64, 16_384),
        ("A100-80", 72, "chatqa2", 8, 16_384),
    ],
)
@pytest.mark.slow
def test_a_plan_that_fits_holds_the_gradients_of_the_chunks_before(card, gib, preset, count, most):
    """The second chunk of a step finds the gradients of all layers, of which the longest sequence
    alone, in one chunk, makes one after the other."""
    model = CostModel(model_shape("Llama-3.1-8B"), Machine.named(card), Training())
    lens = draw_with_longest(preset, count, 0, max_seq_len=most)
    limits = Limits(gib * GIB, 144 * GIB)
    answer = search(Question([lens], model, limits, num_devices=8))
    assert answer.tried
    for one in answer.tried:
        plan, memory = one.plan_of(one.space.busiest[0]), one.space.model.memory()
        assert all(limits.hold(needs_of(memory.curve(plan, n))) for n in range(len(plan.actions)))


QWEN = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("H100"), Training())
STAGES = {"dp": 1, "sp": 1, "pp": 2, "size": 1024, "keep": "kv"}


@pytest.mark.parametrize(("num_bytes", "fits"), [(11_602_538_495, False), (11_602_538_496, True)])
def test_a_pipeline_holds_its_batch_and_not_only_the_longest_sequence(num_bytes, fits):
    """With the first chunks of others 10,634,964,992 bytes: a second long one retains its own."""
    given = STAGES | {"num_retained": 4}
    limits = Limits(num_bytes, margin=0)
    question = Question([[4096] * 12], QWEN, limits, 2, given=given, stages=(16, 8))
    assert bool(search(question).tried) == fits


def test_a_whole_step_fits_though_a_part_of_it_decides():
    """Of a step of more than 2**18 tokens two devices time a part, here without neighbours that are
    both long."""
    seq_lens = [8192, *[4096] * 3, *[128] * 2000]

    def decided(num_bytes, **given):
        question = Question((), QWEN, Limits(num_bytes, margin=0), 2, given=STAGES | given)
        lengths, size = count_lengths(seq_lens), StepSize(len(seq_lens))
        return decide(question, lengths, size=size, must_fit=True)

    best = decided(20 * GIB, num_retained=4).answer.best
    assert needs_in(best, seq_lens) == best.needs > needs_in(best, best.longest)
    with pytest.raises(ConfigError):
        decided(best.needs.device_bytes - 1, num_retained=4)
    other = decided(best.needs.device_bytes - 1).answer.best  # the next one
    assert max(needs_in(other, seq_lens), other.needs) == other.needs < best.needs


def needs_in(candidate, seq_lens):
    plan = candidate.plan_of(tuple(seq_lens))
    return most_of(needs_of(QWEN.memory().curve(plan, rank)) for rank in (0, 1))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_more_processes_of_one_cpu_are_no_advice(num_devices, alone):
    """They share its RAM."""
    model = CostModel(model_shape("Qwen2.5-7B"), Machine.named(THIS_CPU), Training())
    question = Question([[512]], model, Limits(GIB), num_devices=num_devices)
    change = nothing_fits(search(question), alone=alone).change
    assert "memory.device" in change
    assert not any(words in change for words in ("more devices", "several devices", "processes"))
