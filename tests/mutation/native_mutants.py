"""Bugs planted in the compiled kernels: each compiles, and one check must turn red."""

from __future__ import annotations

from tests.mutation.encoder_mutants import ENCODER_KERNEL_MUTANTS
from tests.mutation.head_mutants import HEAD_MUTANTS
from tests.mutation.mutants import PROBE_DIFFERS, Mutant, Refusal


def _mutant(name: str, file: str, old: str, new: str, killer: str, refused: Refusal | None = None) -> Mutant:
    return Mutant(name, 0, f"kernels/native/{file}", old, new, killer, refused=refused)


def _described(name: str, file: str, old: str, new: str) -> Mutant:
    """A bug in what a layer is described to be, in the kernels or before them, which the probe notices at load."""
    return Mutant(name, 0, file, old, new, "kernels_families", refused=PROBE_DIFFERS)


_MIXER = "kernels/native/mixer.inc"
_DECODER, _ACTIVATION = "kernels/native/decoder.inc", "kernels/native/activation.inc"
_DESCRIBED = "model/layer_builder.py"
DESCRIPTION_MUTANTS = (
    _described("a norm without its offset", _DESCRIBED, " + family.norm_offset", " + 0"),
    _described(
        "heads of a joined projection in another order",
        "model/matrices.py",
        "(3 * head + which)",
        "(which * num_heads + head)",
    ),
    _described("learned positions begin at the first row", "model/fused.py", "[family.first_position :]", "[:]"),
    _described(
        "local layers turn like the others",
        "model/fused.py",
        "(size, layer_type) for",
        "(size, self._layer_types[-1]) for",
    ),
    _described("layers without positions have some", _DESCRIBED, "        rotary = None\n", "        pass\n"),
    _described(
        "the norm behind a part is forgotten", _DECODER, "NAME(apply_norm)(post_norm, 0, delta, hidden, delta);", ""
    ),
    _described("what a part adds is not scaled", _DECODER, "delta[i] * (REAL)layer->residual_scale", "delta[i]"),
    _described("the mean stays in a layer norm", "kernels/native/norm.inc", "mean /= (REAL)size;", "mean = 0;"),
    _described("all heads have the factors of the first", _DECODER, "(norm, head * model->head_dim, x,", "(norm, 0, x,"),
    _described("heads are normalised one by one", _DECODER, "if (!layer->whole_norms)", "if (1)"),
    _described(
        "another part of a head is turned",
        _DECODER,
        "NAME(rotate)(x, layer->rotary",
        "NAME(rotate)(x + model->head_dim - model->rotary_dim, layer->rotary",
    ),
    _described("neighbours turn like halves", _DECODER, "if (interleaved) {", "if (0) {"),
    _described("positions are one too far", _DECODER, "position_table[position *", "position_table[(position + 1) *"),
    _described("embeddings are not scaled", _DECODER, "if (model->embed_scale != 1)", "if (0)"),
    _described("logits are not scaled", _DECODER, "*at *= scale;", ""),
    _described("logits are not capped", _DECODER, "if (cap != 0)", "if (0)"),
    _described(
        "a feed-forward beside attention reads its norm",
        _DECODER,
        "layer->mlp_norm.kind == NORM_NONE ? &layer->attention_norm : &layer->mlp_norm",
        "&layer->attention_norm",
    ),
    _described("heads are not gated", _DECODER, "if (layer->gated_heads)", "if (0)"),
    _described("what stands beside experts is not scaled", _DECODER, "x[c] *= worker->buffers->beside_scales[r];", "{}"),
    _described(
        "a window of a convolution follows the rows of a tree", _MIXER, "parent = m->parents[first + parent];", "parent--;"
    ),
    _described(
        "a kept window lacks the row itself",
        _MIXER,
        "w = 1; kept && w < mixer->width; w++",
        "w = 1; kept && w < mixer->width - 1; w++",
    ),
    _described("queries and keys keep their length", _MIXER, "out[i] = x[i] * factor * scale;", "out[i] = x[i] * scale;"),
    _described("a step is not bent", _MIXER, "return x > 20 ? x : log1p(exp(x));", "return x;"),
    _described(
        "values of a scan are not scaled by their steps", _MIXER, "x[2 * keyed + i] * (REAL)step;", "x[2 * keyed + i];"
    ),
    _described("a scan skips nothing", _MIXER, "if (mixer->skip)", "if (0)"),
    _described("gates come behind the norm of a scan", _MIXER, "if (mixer->gates_first)", "if (0)"),
    _described("what leaves a convolution is not gated", _MIXER, "x[c] *= x[2 * channels + c];", "{}"),
    _described("scores are not capped", "kernels/native/attention.inc", "softcap != 0 && i < seen.to", "0"),
    _described("the tail of a normal number is counted twice", _ACTIVATION, "x[i] = 0.5 * erfc(", "x[i] = erfc("),
)


def _of_experts(name: str, old: str, new: str) -> Mutant:
    """A bug in the feed-forward of experts, which is called here without a probe."""
    return _mutant(name, "experts.inc", old, new, "kernels_experts")


EXPERT_MUTANTS = (
    _of_experts(
        "rows of an expert are its first row",
        "buffers->normed + lists->row[first + r] *",
        "buffers->normed + lists->row[first] *",
    ),
    _of_experts("weights of a row's experts are shares", "if (experts->normalised) for", "if (0) for"),
    _of_experts("weights of a row's experts are normalised", "if (experts->normalised) for", "if (1) for"),
    _of_experts(
        "an expert is forgotten where two rows share it",
        "    const LINEAR *down = experts->down + expert;\n    const int64_t last = lists->first[expert + 1];",
        "    const LINEAR *down = experts->down + expert;\n    const int64_t last = lists->first[expert] + 1;",
    ),
    _of_experts(
        "the order of a row's sum is that of the batch",
        "(buffers->out + place[i] * buffers->out_stride + c) * weights[i];",
        "(buffers->out + place[(i + place[0]) % experts->chosen] * buffers->out_stride + c) * "
        "weights[(i + place[0]) % experts->chosen];",
    ),
    _of_experts("the last of equal experts is chosen", "return a > b || (", "return a >= b || ("),
    _of_experts(
        "many rows of an expert overwrite each other",
        "buffers->out + (first + r) *",
        "buffers->out + (lists->first[expert] + r) *",
    ),
    _of_experts(
        "a gate is not bounded", "NAME(bounded_above)(*(const VEC *)(gate + c), limit)", "*(const VEC *)(gate + c)"
    ),
    _of_experts(
        "values are bounded above alone",
        "-NAME(bounded_above)(-NAME(bounded_above)",
        "NAME(bounded_above)(NAME(bounded_above)",
    ),
    _of_experts(
        "all gates of a block meet the same values",
        "panels > 1 ? gate + PANEL : values + r * PANEL",
        "panels > 1 ? gates + PANEL : values",
    ),
)

LAYOUT_DIFFERS = Refusal(
    "KernelMismatchError",
    "the compiled kernels come from other sources",
    "every constant and every field is compared with what the package writes, before a kernel is called",
)

_FUSED_PASS, _MIXER_ROWS = "model/fused.py", "kernels/mixers.py"
_SIBLINGS = Mutant(
    "siblings of a tree change one state after another in a whole pass",
    13,
    "model/batch.py",
    "return range(-1, self.num_rows - 1) if self.parents is None else self.parents",
    "return range(-1, self.num_rows - 1)",
    "kernels_running",
)
#: What becomes of running states around a whole pass of the kernels.
PASS_MUTANTS = tuple(
    Mutant(name, 13, file, old, new, killer)
    for name, file, old, new, killer in (
        (
            "the windows of a text are those of the first rows of the pass",
            _FUSED_PASS,
            "rows.keep_windows(window.state, first, window.wanted)",
            "rows.keep_windows(window.state, 0, window.wanted)",
            "kernels_running",
        ),
        (
            "the matrices of a text are those of the first rows of the pass",
            _FUSED_PASS,
            "rows.keep_states(matrix.state, first, matrix.wanted)",
            "rows.keep_states(matrix.state, 0, matrix.wanted)",
            "kernels_running",
        ),
        (
            "a tape holds the first rows of the pass",
            _FUSED_PASS,
            "each[first : first + part.segment.num_rows]",
            "each[: part.segment.num_rows]",
            "kernels_running",
        ),
        (
            "a matrix is left out of what a pass leaves",
            _FUSED_PASS,
            "            if matrix is not None:\n",
            "            if False:\n",
            "kernels_running",
        ),
        (
            "a kept state is that of the chunk's end",
            "model/running.py",
            "states[position - start - 1]) for position in self._passed",
            "states[self.wanted[-1]]) for position in self._passed",
            "kernels_running",
        ),
        (
            "the kernels write the states that they read",
            _MIXER_ROWS,
            "{row: torch.empty_like(like) for row in rows}",
            "{row: like for row in rows}",
            "kernels_running_failure",
        ),
        (
            "windows of all texts are left in one place",
            _MIXER_ROWS,
            "{row: torch.empty_like(like) for row in rows}",
            "{row: vars(self).setdefault('one', torch.empty_like(like)) if like.dim() == 2 else torch.empty_like(like) "
            "for row in rows}",
            "kernels_running",
        ),
        (
            "all texts look for their windows where the first one has its own",
            _MIXER,
            "from[w] = m->rows->windows[segment] +",
            "from[w] = m->rows->windows[0] +",
            "kernels_running",
        ),
    )
)
NATIVE_MUTANTS = (
    _mutant(
        "a row sees the rows after it",
        "attention.inc",
        "NAME(least)(position + 1, end) - begin};",
        "end - begin};",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "a row sees one key too many",
        "attention.inc",
        "NAME(least)(position + 1, end) - begin};",
        "NAME(least)(position + 2, end) - begin};",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "a tree's row sees its uncles",
        "attention.inc",
        "while (!sequence->ancestry[row * sequence->rows + other] || sequence->positions",
        "while (sequence->positions",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "the window is one too wide",
        "attention.inc",
        "position - shape->window + 1)",
        "position - shape->window)",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "positions of a tree by row",
        "attention.inc",
        "const int64_t position = sequence->positions[other];",
        "const int64_t position = sequence->start + other;",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "blocks are taken for consecutive",
        "attention.inc",
        "a->sequence->table[block] *",
        "(a->sequence->table[0] + block) *",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "attention forgets a block",
        "attention.inc",
        "places[i + j] = at + j * slot;",
        "places[i + j] = at + (block == 9 ? 0 : j) * slot;",
        "kernels_attention",
    ),
    _mutant(
        "attention forgets the tile at the end of a run",
        "attention.inc",
        "        if (seen.from >= seen.to) continue;\n",
        "        if (seen.from >= seen.to || ((begin + at + count) % RUN_KEYS == 0 && at > 0)) continue;\n",
        "kernels_attention",
    ),
    _mutant(
        "runs begin elsewhere for a single row",
        "decoder.inc",
        "const int64_t run_begin = run * RUN_KEYS, run_end = run_begin + RUN_KEYS;",
        "const int64_t shift = 8 * (task->end - task->first == 1), run_begin = run ? run * RUN_KEYS - shift : 0, "
        "run_end = (run + 1) * RUN_KEYS - shift;",
        "kernels_attention",
    ),
    _mutant(
        "heads that attend together read the keys of the first",
        "attention.inc",
        "skip = h * NAME(head_bytes)(a->shape), dim",
        "skip = 0, dim",
        "kernels_attention_operator",
    ),
    _mutant(
        "heads that attend together have the queries of the first",
        "attention.inc",
        "return (h * (a->end - a->first) + row - a->first) *",
        "return (row - a->first) *",
        "kernels_attention_operator",
    ),
    _mutant(
        "heads that attend together add the values of the first",
        "attention.inc",
        "{places, h * NAME(head_bytes)(a->shape),",
        "{places, 0,",
        "kernels_attention_operator",
    ),
    _mutant(
        "the last heads of a run are left out",
        "decoder.inc",
        "h < NAME(least)(end, heads); h += some)",
        "h < NAME(least)(end, heads) - (h > 0); h += some)",
        "kernels_attention_operator",
    ),
    _mutant(
        "runs that are tasks are folded from the last",
        "decoder.inc",
        "const NAME(found) found = NAME(found_in_run)(model, buffers, row, head, run);",
        "const NAME(found) found = NAME(found_in_run)(model, buffers, row, head, position / RUN_KEYS + first + 1 - run);",
        "kernels_attention",
    ),
    _mutant(
        "what came before a larger score is not lowered",
        "attention.inc",
        "before->totals[g] * earlier[0] +",
        "before->totals[g] +",
        "kernels_attention",
    ),
    _mutant(
        "scores are capped at twice the cap",
        "attention.inc",
        "NAME(tanh)(*score / softcap) * softcap;",
        "NAME(tanh)(*score / softcap) * softcap * 2;",
        "kernels_attention",
    ),
    _mutant(
        "sinks of the first group for all",
        "attention.inc",
        "shape->sinks[head * group + g]",
        "shape->sinks[0]",
        "kernels_attention",
    ),
    _mutant(
        "queries of an operator are not scaled",
        "paged.inc",
        "* (REAL)job->layer.scale",
        "* 1",
        "kernels_attention_operator",
    ),
    _mutant(
        "an operator forgets its window",
        "paged.inc",
        "job->layer.window = call->window;",
        "",
        "kernels_attention_operator",
    ),
    _mutant(
        "soft caps are not handed on",
        "paged.inc",
        "job->layer.softcap = call->softcap;",
        "",
        "kernels_attention_operator",
    ),
    _mutant(
        "sinks are not handed on",
        "paged.inc",
        "job->layer.sinks = call->sinks;",
        "",
        "kernels_attention_operator",
    ),
    _mutant(
        "an operator forgets its chunks",
        "paged.inc",
        "job->layer.chunk = call->chunk;",
        "",
        "kernels_attention_operator",
    ),
    _mutant(
        "epsilon outside the root",
        "norm.inc",
        "(double)(sum / (REAL)size) + norm->epsilon))",
        "(double)(sum / (REAL)size)) + norm->epsilon)",
        "kernels_decoder",
    ),
    _mutant(
        "rotation the other way",
        "decoder.inc",
        "x[i] = a * cosines[i] - b * sines[i];",
        "x[i] = a * cosines[i] + b * sines[i];",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "columns behind the last whole panel are not packed",
        "pack.inc",
        "left < PANEL ? (int)left : PANEL",
        "left < PANEL ? 0 : PANEL",
        "kernels_linear",
    ),
    _mutant(
        "every panel is packed from the first rows",
        "pack.inc",
        "work->stored + row",
        "work->stored",
        "kernels_linear",
    ),
    _mutant(
        "halves of a panel are not unfolded when it is unpacked",
        "pack.inc",
        "unpack_uint16_t(panel, count, steps, PANEL, folded, rows)",
        "unpack_uint16_t(panel, count, steps, PANEL, 0, rows)",
        "kernels_linear",
    ),
    _mutant(
        "a run forgets the sums before it",
        "tiles.inc",
        "run->first ? (VEC){0}",
        "1 ? (VEC){0}",
        "kernels_linear",
    ),
    _mutant(
        "every second run of K is left out",
        "product.inc",
        "        k += most;",
        "        k += 2 * most;",
        "kernels_linear",
    ),
    _mutant(
        "the first row of a tile stands for the second, too",
        "tiles.inc",
        "x[r * STEPS_AT_ONCE + k + f]",
        "x[(r == 1 ? 0 : r) * STEPS_AT_ONCE + k + f]",
        "kernels_linear",
    ),
    _mutant(
        "a panel is left out behind each block",
        "product.inc",
        "left->at += most;",
        "left->at += most + 1;",
        "kernels_linear",
    ),
    _mutant(
        "a tile is left out at the border of blocks of rows",
        "product.inc",
        "block->end_tile = tiles * (b + 1) / blocks;",
        "block->end_tile = tiles * (b + 1) / blocks - (b + 1 < blocks);",
        "kernels_linear",
    ),
    _mutant(
        "rows are staged for a product with one row",
        "rows.inc",
        "(block * n + row) * STEPS_AT_ONCE",
        "(block + row) * STEPS_AT_ONCE",
        "kernels_linear",
    ),
    _mutant(
        "columns of the feed-forward are staged over one another",
        "decoder.inc",
        "x, column, end, n, r,",
        "x, 0, end - column, n, r,",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "int8 without its scale",
        "product.inc",
        "if (linear->scale) sum *=",
        "if (0) sum *=",
        "kernels_linear",
    ),
    _mutant(
        "activations by other numbers",
        "simd.h",
        "ACTIVATION_SILU = 0,\n    ACTIVATION_GELU_TANH = 1,",
        "ACTIVATION_SILU = 1,\n    ACTIVATION_GELU_TANH = 0,",
        "kernels_linear",
        LAYOUT_DIFFERS,
    ),
    _mutant(
        "a field that Python does not know",
        "decoder.inc",
        "    REAL *const *states; ",
        "    int64_t unknown;\n    REAL *const *states; ",
        "kernels_linear",
        LAYOUT_DIFFERS,
    ),
    _mutant(
        "nibbles of a group without the middle that is subtracted",
        "simd.h",
        "words ^ 0x88888888u",
        "words ^ 0",
        "kernels_formats",
    ),
    _mutant(
        "zero points are those of the next column",
        "tiles.inc",
        "(group + c * run->stride + 2 * PANEL)",
        "(group + c * run->stride + 2 * PANEL + 1)",
        "kernels_formats",
    ),
    _mutant(
        "every group has the scale of its panel's neighbour",
        "tiles.inc",
        "(group + c / 2 * run->stride) + c % 2 * LANES",
        "(group + c / 2 * run->stride)",
        "kernels_formats",
    ),
    _mutant(
        "a group forgets those before it",
        "tiles.inc",
        "run->first && k == 0 ? (floats){0} : (floats)*total",
        "k == 0 ? (floats){0} : (floats)*total",
        "kernels_formats",
    ),
    _mutant(
        "nibbles meet rounded rows in their old order",
        "rows.inc",
        "found[k + 2 * (i % 4) + i / 4]",
        "found[k + i]",
        "kernels_formats",
    ),
    _mutant(
        "nibbles are not lowered for rounded rows",
        "rows.inc",
        "? -8 * total :",
        "? -7 * total :",
        "kernels_formats",
    ),
    _mutant(
        "every row has the scale of the first",
        "tiles.inc",
        "numbers[r * GROUP_NUMBERS]",
        "numbers[0]",
        "kernels_formats",
    ),
    _mutant(
        "a rounded row keeps the numbers of its first group",
        "tiles.inc",
        "        numbers += run->numbers_stride;\n",
        "",
        "kernels_formats",
    ),
    _mutant(
        "codes of 4 bits come into other bytes of their word",
        "formats/blocks.inc",
        "(four | four << (16 - 2 * width)) & halves",
        "(four | four << (15 - 2 * width)) & halves",
        "kernels_blocks",
    ),
    _mutant(
        "the likeliest token is looked for behind the last whole block alone",
        "sampling.inc",
        "        if (any) break;\n",
        "",
        "kernels_laws",
    ),
    _mutant(
        "an entry that is not a number is overlooked behind the last whole vector",
        "sampling.inc",
        "        found |= x[i] != x[i];\n",
        "",
        "kernels_finite",
    ),
    _mutant(
        "a row that is not a number has a likeliest token",
        "sampling.inc",
        "isfinite(largest) ?",
        "largest != INFINITY ?",
        "kernels_finite",
    ),
    _mutant(
        "halves of codes that are narrowed are rounded up",
        "units.inc",
        "/ (farthest ? step : 1);",
        "/ (farthest ? step : 1) + .01f;",
        "kernels_blocks",
    ),
    _mutant(
        "blocks of 5 bits are narrowed without their fifth bits",
        "units.inc",
        "    if (block->fifths) NAME(unfold_plane)(block->fifths, 1, 4, block->codes);\n",
        "",
        "kernels_blocks",
    ),
    _mutant(
        "all columns of a panel of blocks have the codes of the first",
        "pack.inc",
        "memcpy(words + column, rows[column] + 4 * i, 4);",
        "memcpy(words + column, rows[0] + 4 * i, 4);",
        "kernels_blocks",
    ),
    _mutant(
        "the second part of a unit begins with the sum of the first",
        "block_bytes.inc",
        "part ? LESS_SECOND : LESS_FIRST;",
        "LESS_FIRST;",
        "kernels_blocks",
    ),
    _mutant(
        "every row of a unit has the scale of the first",
        "block_bytes.inc",
        "splat(numbers[row * UNIT_NUMBERS + which])",
        "splat(numbers[which])",
        "kernels_blocks",
    ),
    _mutant(
        "a rounded row keeps the numbers of its first unit",
        "block_bytes.inc",
        "        numbers += block->n * UNIT_NUMBERS;\n",
        "",
        "kernels_blocks",
    ),
    _mutant(
        "lows of parts are added and not subtracted",
        "block_bytes.inc",
        "= -found->low *",
        "= found->low *",
        "kernels_blocks",
    ),
    _mutant(
        "the halves of a rounded unit are one half twice",
        "rows.inc",
        "const int32_t less[] = {-(first + second), -first, -second};",
        "const int32_t less[] = {-(first + second), -first, -first};",
        "kernels_blocks",
    ),
    _mutant(
        "int8 sums of large rows overflow",
        "rows.inc",
        "if (linear->format == FORMAT_REAL || linear->format == FORMAT_BF16) return 1;",
        "return 1;",
        "kernels_linear",
    ),
    _mutant(
        "int8 rows are lowered and not lifted again",
        "product.inc",
        "1 / NAME(lowering)(linear)",
        "1",
        "kernels_linear",
    ),
    _mutant(
        "top_k by the value of the next",
        "sampling.inc",
        "(double)call->top_k[row], histogram",
        "(double)(call->top_k[row] + 1), histogram",
        "kernels_laws",
    ),
    _mutant(
        "all equals stay at the edge of top_p",
        "sampling.inc",
        "if (kept.equals == equals) kept",
        "if (1) kept",
        "kernels_laws",
    ),
    _mutant(
        "a token too many in top_p",
        "sampling.inc",
        "|| kept.mass < limit)",
        "|| kept.mass <= limit)",
        "kernels_laws",
    ),
    _mutant(
        "what is no longer looked at is forgotten",
        "sampling.inc",
        "set_aside_sum = *above;",
        "set_aside_sum = 0;",
        "kernels_laws",
    ),
    _mutant(
        "the smallest of a range is left behind",
        "sampling.inc",
        "(here >= leasts)",
        "(here > leasts)",
        "kernels_laws",
    ),
    _mutant(
        "a range below zero holds the zeros, too",
        "sampling.inc",
        "bound = NAME(value_of_key)(high);",
        "bound = (REAL)nextafter((double)NAME(value_of_key)(high - 1), INFINITY);",
        "kernels_exact_laws",
    ),
    _mutant(
        "min_p scales and does not cut",
        "sampling.inc",
        "        kept.edge = least_weight;\n",
        "",
        "kernels_laws",
    ),
    _mutant(
        "the race runs on p alone",
        "sampling.inc",
        "const double time = p / -log(u);",
        "const double time = p;",
        "kernels_laws",
    ),
    _mutant(
        "the race skips too early",
        "sampling.inc",
        "if (p < best * (1.0 - u))",
        "if (p < best * 2.0 * (1.0 - u))",
        "kernels_laws",
    ),
    _mutant(
        "inversion forgets what it passed",
        "sampling.inc",
        "        left -= run;\n",
        "",
        "kernels_laws",
    ),
    _mutant(
        "the least number gives the scale of a row", "pack.inc", "bits > most ? bits : most;", "bits;", "kernels_rounding"
    ),
    _mutant("signs count for the scale of a row", "pack.inc", "& 0x7fffu;", "& 0xffffu;", "kernels_rounding"),
    _mutant("halves are rounded up", "pack.inc", "rintf(", "floorf(0.5f + ", "kernels_rounding"),
    _mutant("a row without weights is divided by nothing", "pack.inc", "largest < FLT_MIN", "0", "kernels_rounding"),
    _mutant(
        "the rows of the last thread have no weights",
        "pack.inc",
        "*end = work->rows * (team_thread() + 1) / team_size();",
        "*end = work->rows * (team_thread() + 1) / (team_size() + 1);",
        "kernels_rounding",
    ),
    _mutant(
        "a branch goes on from the row before it",
        "recurrence.inc",
        "(call->parents[r] + 1) * size",
        "r * size",
        "kernels_recurrence",
    ),
    _mutant("a correction is made as a whole", "recurrence.inc", ".line[c]) * share;", ".line[c]);", "kernels_recurrence"),
    _mutant(
        "heads that share keys have those of the first",
        "recurrence.inc",
        "head / (call->heads / call->key_heads)",
        "0",
        "kernels_recurrence",
    ),
    _mutant(
        "all rows have the scale of the first", "pack.inc", "work->scale[row], 1,", "work->scale[0], 1,", "kernels_rounding"
    ),
    *DESCRIPTION_MUTANTS,
    *EXPERT_MUTANTS,
    *PASS_MUTANTS,
    _SIBLINGS,
    *HEAD_MUTANTS,
    *ENCODER_KERNEL_MUTANTS,
)
