"""Faults that the fast suite catches: each is one line changed in a copy of the package, and the
test that fails by it. A test may only be deleted if every mutant still dies.

The nights run them. By hand: `python -m pytest tests/test_mutants.py -k "window or tied"`.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import furlong

PACKAGE = Path(furlong.__file__).parent
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    old: str
    """Text that stands in one place of the package, whichever file that is in."""
    new: str
    killed_by: str
    """A fast test, below tests/."""


MUTANTS = {
    # the store and attention
    "a window shows one key of the prefix too few": Mutant(
        "left = window - 1\n", "left = window - 2\n",
        "kv/test_segments.py::test_a_step_gives_the_bits_of_plain_tensors",
    ),
    "relayed gradients are summed in 16 bits": Mutant(
        "self._wide = torch.float32 if like.dtype.itemsize < 4 else like.dtype",
        "self._wide = like.dtype",
        "kv/test_kv_store.py::test_gradients_arrive_at_their_own_piece_in_float32",
    ),
    "values get nothing from later chunks": Mutant(
        "dv[:, kept] += dv_relayed", "pass",
        "ops/test_chunk_attention.py::test_chunks_give_the_whole_and_all_its_gradients",
    ),
    "the backward knows no attention sinks": Mutant(
        "            lse = with_sinks\n", "",
        "ops/test_chunk_attention.py::test_chunks_give_the_whole_and_all_its_gradients",
    ),
    "latents get nothing from later chunks": Mutant(
        "rows.copy_(rows.to(latents.dtype) + latents)", "pass",
        "equivalence/test_latents.py::test_an_odd_width",
    ),
    "states get nothing from later chunks": Mutant(
        "return None, dy, *ctx.later_grads()",
        "return None, dy, *(None for _ in ctx.later_grads())",
        "kv/test_states.py::test_a_state_relays_its_gradient_through_two_slices",
    ),
    "of the copies of a head on several processes one is taken": Mutant(
        "u * width // num_heads, head_dim).to(_wide(x)).sum(2)",
        "u * width // num_heads, head_dim)[:, :, 0]",
        "ops/test_placed_attention.py::test_places_give_the_whole_and_all_its_gradients",
    ),
    "gradients that come back from memory off the device stay as they were": Mutant(
        "if not writes:\n            self._give(tensor", "if True:\n            self._give(tensor",
        "equivalence/test_matrix.py::test_every_pair_of_dials",
    ),
    "what was on its way back outlives what is written over it": Mutant(
        "        self._forget_read(h)  # a read that was prefetched meanwhile has the old values\n",
        "",
        "kv/test_pools.py::test_what_is_on_its_way_back_gives_way_to_what_is_written",
    ),
    "a lease of a step that failed writes into the next one": Mutant(
        "if era != self._era:", "if False:",
        "kv/test_pools.py::test_clear_forgets_and_the_pool_goes_on",
    ),
    "nothing is written on disk": Mutant(
        "done += os.pwrite(self._file.fileno(), pages[done:], start + done)", "done += len(pages)",
        "equivalence/test_matrix.py::test_every_pair_of_dials",
    ),
    "graphs come back as zeros": Mutant(
        "return flat.as_strided(packed.shape", "return flat.zero_().as_strided(packed.shape",
        "equivalence/test_matrix.py::test_every_pair_of_dials",
    ),
    "remembered attention is that of the stage's first layer": Mutant(
        "for handle in self.saved_attention[layer]]",
        "for handle in self.saved_attention[self.layers[0]]]",
        "equivalence/test_matrix.py::test_every_pair_of_dials",
    ),
    "what goes from stage to stage has no gradient": Mutant(
        "self._deliver((\"gradient\", chunk, stage), cell.x.grad)",
        "self._deliver((\"gradient\", chunk, stage), 0 * cell.x.grad)",
        "equivalence/test_matrix.py::test_every_pair_of_dials",
    ),
    # a step
    "a recompute draws masks of its own": Mutant(
        "with replayed(None if isinstance(action, Forward) else cell.rng,", "with replayed(None,",
        "runtime/test_rng.py::test_a_recompute_draws_what_the_forward_drew",
    ),
    "a hook changes the stored input": Mutant(
        "x = lease.tensor.clone()\n        lease.release()\n        if what.computes",
        "x = lease.tensor\n        lease.release()\n        if what.computes",
        "runtime/test_executor.py::test_what_a_hook_changes_in_place_is_changed_once",
    ),
    "the last label of a sequence is its first token": Mutant(
        "torch.cat([labels[1:].cpu(), last])", "labels.cpu().roll(-1)",
        "runtime/test_chunk_inputs.py::test_the_last_token_of_a_sequence_predicts_nothing",
    ),
    "extras are those of the token before": Mutant(
        "(index, at + tokens.start + 1)", "(index, at + tokens.start)",
        "values/test_token_loss.py::test_sums_over_tokens_have_the_models_own_gradients",
    ),
    "a row that several tokens follow counts once": Mutant(
        "gradient.index_add_(0, tile, tile_hidden.grad)", "gradient[tile] = tile_hidden.grad",
        "equivalence/test_trees.py::test_every_pair_of_dials_is_exact",
    ),
    "chunks are summed in the dtype that they compute in": Mutant(
        "sums[key] = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))",
        "sums[key] = leaf.grad",
        "runtime/test_precision.py::test_chunks_are_summed_in_float32",
    ),
    "a backward takes any model for that of its forward": Mutant(
        "if not moved <= bound:", "if not moved <= 1e9 * bound:",
        "values/test_accidents.py::test_accidents_leave_nothing_behind",
    ),
    # the start-up check
    "an evaluation repacks 4 bits": Mutant(
        "linear.support_avx512bf16_for_cpu = False", "pass",
        "models/test_quantized.py::test_what_would_repack_the_weights_is_off",
    ),
    "4 bits may give any gradient": Mutant(
        "    check_packed_linears(model)\n    whole", "    whole",
        "models/test_quantized.py::test_a_linear_layer_without_its_gradient_is_refused",
    ),
    "scales of 4 bits are not in the checksum": Mutant(
        "return weight.detach(), *scales_of(weight)", "return (weight.detach(),)",
        "models/test_quantized.py::test_scales_are_in_the_checksum",
    ),
    "gradients of pieces are compared in the order of their graphs": Mutant(
        "for chunk in sorted(begun)]", "for chunk in begun]",
        "runtime/test_self_check.py::test_the_error_of_a_family_is_rounding_alone",
    ),
    "stages may give anything": Mutant(
        "_CUT_BOUND, _NARROW_CUT_BOUND = 1e-5, 1e-3", "_CUT_BOUND, _NARROW_CUT_BOUND = 1e9, 1e9",
        "runtime/test_self_check.py::test_attention_that_is_kept_wrongly_is_seen",
    ),
    "16 bits are checked without a tiny twin": Mutant(
        "not hides_lengths(model) and not is_narrow", "not hides_lengths(model)",
        "runtime/test_self_check.py::test_attention_that_is_kept_wrongly_is_seen",
    ),
    "16 bits have one wide bound": Mutant(
        "most = max(most, min(2 * max(moved.values()), _NARROW_BOUND))", "most = _NARROW_BOUND",
        "runtime/test_self_check.py::test_tokens_that_meet_beside_attention_are_seen",
    ),
    "hooks and forwards of a model are only counted": Mutant(
        'return getattr(function, "__code__", type(function))', "return type(function)",
        "test_api.py::test_what_is_put_into_a_checked_model_is_checked",
    ),
    "a model is not checked anew when it trains": Mutant(
        "structure, hash(modes), trained", "structure, 0, trained",
        "test_api_refusals.py::test_what_differs_in_train_mode_alone_is_refused",
    ),
    "a model may be called while a step of it runs": Mutant(
        "self.state.running(), hooked(base, refuse_call):", "self.state.running():",
        "test_calls_beside.py::test_a_plain_call_while_a_step_runs_is_refused_wherever_it_comes",
    ),
    # several processes
    "gradients of tied embeddings are not added up": Mutant(
        "dist.all_reduce(own.to_local() if isinstance(own, DTensor) else own, group=group)",
        "pass",
        "distributed/test_pipeline_engine.py::test_both_copies_of_a_tied_weight_take_the_update_of_one_process",
    ),
    "the loss is that of one process": Mutant(
        "dist.all_reduce(values, group=self._ranks.group)", "pass",
        "distributed/test_pool_engine.py::test_pool_of_two",
    ),
    "an error of the machine stays on one process": Mutant(
        "except Exception as error:\n        report(ranks,",
        "except (TypeError, ValueError) as error:\n        report(ranks,",
        "distributed/test_sharded_engine.py::test_mistakes_are_refused_by_name",
    ),
    "what processes add up is that of each": Mutant(
        "[sum(column) for column in", "[column[0] for column in",
        "distributed/test_failures.py::test_all_processes_end_and_tell_what_ended_them",
    ),
    # plans and predictions
    "packing takes the emptiest bin": Mutant(
        "space, _, index = spaces.pop(place)", "space, _, index = spaces.pop()",
        "planners/test_planner_chunks.py::test_the_fullest_bin_that_has_room_is_filled",
    ),
    "the budget has no margin": Mutant(
        "return int(self.device_bytes * (1 - self.margin))", "return int(self.device_bytes)",
        "planners/test_planner_auto.py::test_a_margin_leaves_room",
    ),
    "the search ends at its first plans": Mutant(
        "return estimate_s > trials.best_s * (1 + SLACK)", "return True",
        "planners/test_planner_auto.py::test_the_last_percents_of_speed_are_not_bought_with_memory",
    ),
    "the last percents of speed are bought with memory": Mutant(
        "(one.needs, one.step_s)", "(one.step_s, one.needs)",
        "planners/test_planner_auto.py::test_the_last_percents_of_speed_are_not_bought_with_memory",
    ),
    "a graph saves three tensors of four": Mutant(
        "layer.saved += num_bytes", "layer.saved += 3 * num_bytes // 4",
        "models/test_describe.py::test_counts_windows_kinds_and_saved_bytes_are_those_of_the_model",
    ),
    # training
    "norms and biases decay": Mutant(
        'settings.weight_decay if p.ndim > 1 else 0.0', 'settings.weight_decay',
        "train/test_optimizer.py::test_norms_biases_and_frozen_weights_do_not_decay",
    ),
    "moments in bfloat16 are rounded to the nearest": Mutant(
        "view(torch.int32) + noise)", "view(torch.int32) + 2**15)",
        "train/test_optimizers.py::test_moments_in_bfloat16_have_the_right_mean",
    ),
    "an answer is measured from its reference alone": Mutant(
        "self.beta * (answer.log_ratio - shared)", "self.beta * answer.log_ratio",
        "train/preference/test_kto.py::test_two_steps",
    ),
    "the cross-entropy of chosen answers is a sum over pairs": Mutant(
        "self.sft_weight * self.num_terms(batch) / num_tokens", "self.sft_weight / num_tokens",
        "train/preference/test_pair_parity.py::test_two_steps",
    ),
    "progress stays at the batch that was taken": Mutant(
        "            data=batch.next_state,\n", "",
        "train/test_step.py::test_progress_goes_on_behind_the_batch_that_was_taken",
    ),
    "a second moment comes back as zeros": Mutant(
        "load_tensors(checkpoint, tensors | rows)",
        "load_tensors(checkpoint, "
        '{name: x for name, x in (tensors | rows).items() if ".exp_avg_sq." not in name})',
        "train/test_checkpoint.py::test_a_run_goes_on_with_its_moments_schedule_and_generator",
    ),
    "gradients are not clipped": Mutant(
        "clip_gradients(self.config.train.max_grad_norm)\n", "clip_gradients(None)\n",
        "train/test_step.py::test_the_update_is_of_clipped_gradients",
    ),
    "an evaluation draws dropout": Mutant(
        "        model.eval()\n        yield", "        yield",
        "train/test_evaluation.py::test_dropout_is_off",
    ),
    "a step that is repeated draws other masks": Mutant(
        "            undo()\n            before.write(device)\n", "            undo()\n",
        "train/test_fitting.py::test_a_step_that_does_not_fit_is_repeated_in_smaller_chunks",
    ),
    # data
    "a stream goes on in a block that is another one": Mutant(
        'elif self.cursor.checksum not in ("", block.checksum) or ', "elif ",
        "data/test_stream.py::test_the_block_at_hand_is_compared_and_what_follows_may_be_mended",
    ),
    "a stream that goes on begins its files anew": Mutant(
        "if (record.file, record.line) > (start.file, start.line):", "if record.line > -1:",
        "data/test_stream.py::test_any_position_goes_on_as_if_nothing_had_happened",
    ),
    "a batch in tokens has one sequence too many": Mutant(
        "start = max(start + 1, bisect_right(ends, before + self.tokens))",
        "start = bisect_right(ends, before + self.tokens) + 1",
        "data/test_loader.py::"
        "test_a_batch_in_tokens_is_closed_when_the_next_sequence_would_go_over",
    ),
    "joined texts begin at the begin of a text": Mutant(
        "begins.append(firsts - (stops[own] - part.seq_lens[own]))", "begins.append(firsts * 0)",
        "data/test_load.py::test_texts_are_joined_over_the_tokens_of_the_cache",
    ),
    "what a prompt says is learnt": Mutant(
        "labels = np.where(learnt, ids, np.int32(IGNORE_INDEX))", "labels = ids",
        "data/test_tokenize.py::test_a_completion_and_its_end_are_learnt",
    ),
    "empty thoughts are learnt": Mutant(
        "start = empty.end()", "pass",
        "data/test_training_templates.py::"
        "test_empty_thoughts_are_learnt_only_where_the_record_has_them",
    ),
    "the stop after the last answer is not written": Mutant(
        "text = text[:stop] + mark", "text = text[:stop]",
        "data/test_training_templates.py::test_a_stop_that_begins_the_next_message_is_learnt",
    ),
    "thoughts are put before an answer that they change": Mutant(
        'if number in shown and not said.endswith(self.empty.sub("", text[start:stop], count=1)):',
        "if False:",
        "data/test_training_templates.py::"
        "test_answers_with_thoughts_are_put_together_only_if_nothing_else_changes",
    ),
    "the last round begins with the first question": Mutant(
        "*asked[-1:]", "*asked[:1]",
        "data/test_formats.py::test_what_is_learnt_of_a_conversation",
    ),
    "an answer that is not wanted counts as wanted": Mutant(
        "{None: 0, True: 1, False: -1}", "{None: 0, True: 1, False: 1}",
        "data/test_load.py::test_the_cache_knows_which_answers_are_wanted",
    ),
    "padding beside token ids is learnt": Mutant(
        "if isinstance(one, Encoded) and _marks_tokens(name, value, one):", "if False:",
        "data/test_unread.py::test_numbers_beside_tokens_are_refused_by_their_shape",
    ),
    "every pass over a part has the same order": Mutant(
        "(*seed, number, 1)", "(*seed, 1)",
        "data/test_loader.py::test_passes_over_a_part_have_orders_of_their_own",
    ),
    "the two answers of a record are drawn apart": Mutant(
        "is_first[1:] = (origins[1:] != origins[:-1]).any(axis=1)", "is_first[1:] = True",
        "data/test_pairs.py::test_the_cache_has_two_rows_of_a_record",
    ),
}  # fmt: skip


def file_with(text):
    """The one file of the package that has `text`, once."""
    found = [
        path for path in PACKAGE.rglob("*.py") for _ in range(path.read_text("utf-8").count(text))
    ]
    assert len(found) == 1, f"{text!r} stands in {len(found)} places"
    return found[0]


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_changes_one_place_and_names_a_fast_test(mutant):
    assert mutant.old != mutant.new
    file_with(mutant.old)
    path, _, name = mutant.killed_by.partition("::")
    before, found, _ = (ROOT / "tests" / path).read_text("utf-8").partition(f"def {name}(")
    marks = before.split("\n\n\n")[-1].splitlines()
    assert found and not {"@pytest.mark.slow", "@pytest.mark.nightly"} & {*marks}


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_dies(mutant, tmp_path):
    path = file_with(mutant.old)
    shutil.copytree(PACKAGE, tmp_path / "furlong", ignore=shutil.ignore_patterns("__pycache__"))
    text = path.read_text("utf-8").replace(mutant.old, mutant.new)
    (tmp_path / "furlong" / path.relative_to(PACKAGE)).write_text(text, "utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m",
         "not slow and not nightly", f"tests/{mutant.killed_by}"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-2000:] + run.stderr[-1000:]
