"""Bugs planted in the compiled kernels: each compiles, and one check must turn red."""

from __future__ import annotations

from tests.mutation.mutants import PROBE_DIFFERS, Mutant, Refusal


def _mutant(name: str, file: str, old: str, new: str, killer: str, refused: Refusal | None = None) -> Mutant:
    return Mutant(name, 0, f"kernels/native/{file}", old, new, killer, refused=refused)


LAYOUT_DIFFERS = Refusal(
    "KernelMismatchError",
    "the compiled kernels come from other sources",
    "every constant and every field is compared with what the package writes, before a kernel is called",
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
        "if (!sequence->ancestry[r * sequence->rows + other] || position",
        "if (position",
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
    ),
    _mutant(
        "blocks are taken for consecutive",
        "attention.inc",
        "a->sequence->table[block] *",
        "(a->sequence->table[0] + block) *",
        "kernels_decoder",
    ),
    _mutant(
        "attention forgets a block",
        "attention.inc",
        "for (; within < size && i < count; within++, i++, at +=",
        "for (int skips = block == 9; within < size && i < count; within++, i++, at += skips ? 0 :",
        "kernels_attention",
    ),
    _mutant(
        "attention forgets the tile at the end of a run",
        "attention.inc",
        "            if (seen.from >= seen.to) continue;\n",
        "            if (seen.from >= seen.to || (tile_end % RUN_KEYS == 0 && at > begin)) continue;\n",
        "kernels_attention",
    ),
    _mutant(
        "runs begin elsewhere for a single row",
        "decoder.inc",
        "const int64_t run_begin = run * RUN_KEYS, run_end = run_begin + RUN_KEYS;",
        "const int64_t shift = 8 * (end - first == 1), run_begin = run ? run * RUN_KEYS - shift : 0, "
        "run_end = (run + 1) * RUN_KEYS - shift;",
        "kernels_attention",
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
        "softcap - 2 * softcap / (1",
        "2 * softcap - 4 * softcap / (1",
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
        "epsilon outside the root",
        "decoder.inc",
        "(double)(sum / (REAL)size) + epsilon))",
        "(double)(sum / (REAL)size)) + epsilon)",
        "kernels_decoder",
    ),
    _mutant(
        "rotation the other way",
        "decoder.inc",
        "a * cosines[i] - b * sines[i];",
        "a * cosines[i] + b * sines[i];",
        "kernels_decoder",
        PROBE_DIFFERS,
    ),
    _mutant(
        "a run forgets the sums before it",
        "linear.inc",
        "run->begin ? *(const",
        "run->begin < 0 ? *(const",
        "kernels_linear",
    ),
    _mutant(
        "int8 without its scale",
        "linear.inc",
        "if (kind == WEIGHTS_INT8) sum *=",
        "if (kind == 9) sum *=",
        "kernels_linear",
    ),
    _mutant(
        "activations of the gate by other numbers",
        "simd.h",
        "GATE_SILU = 0, GATE_GELU_TANH = 1",
        "GATE_SILU = 1, GATE_GELU_TANH = 0",
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
        "int8 sums of large rows overflow",
        "linear.inc",
        "const int ordinary = magnitude <= allowed ||",
        "const int ordinary = magnitude >= 0 ||",
        "kernels_linear",
    ),
    _mutant(
        "int8 rows are lowered and not lifted again",
        "linear.inc",
        "lifts[r] != 1) sum *= lifts[r];",
        "lifts[r] != 1) sum *= 1;",
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
)
