//! What the kernels of cuda/llm get. Addresses are those of the device; 0 stands for a tensor that is not there.

use super::super::common::mirrored::{Layout, mirrored};
use super::super::common::raw::TensorMap;

mirrored! {
    /// Of cuda/llm/paged_attention.cuh.
    struct PagedCall {
        query: u64,
        key: u64,
        value: u64,
        output: u64,
        pool: u64,
        scales: u64,
        key_weights: u64,
        row_sums: u64,
        partials: u64,
        row_offsets: u64,
        cached_len: u64,
        page_indptr: u64,
        page_ids: u64,
        positions: u64,
        cos: u64,
        sin: u64,
        sinks: u64,
        slopes: u64,
        write_slots: u64,
        token_pos: u64,
        partial_count: i64,
        pool_pages: i64,
        window: i64,
        sequences: i32,
        total_rows: i32,
        query_heads: i32,
        kv_heads: i32,
        head_size: i32,
        page_size: i32,
        page_entries: i32,
        position_rows: i32,
        half_width: i32,
        interleaved: i32,
        format: i32,
        slot_len: i32,
        weights_len: i32,
        scale: f32,
        softcap: f32,
    }

    /// Of cuda/llm/projection_sm90.cuh.
    struct FewRows {
        scales: u64,
        bias: u64,
        residual: u64,
        outputs: [u64; 3],
        parts: u64,
        ready: u64,
        widths: [i32; 3],
        rows: i32,
        depth: i32,
        columns: i32,
        gate: i32,
        unused: i32,
    }

    /// The tensors of a call, of cuda/llm/projection_sm90.cuh.
    struct FewRowsMaps {
        weight: TensorMap,
        scales: TensorMap,
        x: TensorMap,
    }

    /// A change of one token's logit, of cuda/llm/sampling.cuh.
    struct TokenEdit {
        /// The token. One that has no logit is ignored.
        token: u32,
        /// Of a bias: the bits of the f32 that is added. Of a token that was seen: how often it is in the output.
        value: u32,
    }

    /// How the token of one row is chosen, of cuda/llm/sampling.cuh. A number that points outside its tensor is harmless.
    struct SamplingRow {
        /// The draw depends on this and on the position.
        seed: u64,
        /// The token's position.
        position: u64,
        /// The row of the logits.
        row: i32,
        /// The row's edits begin here: biases, tokens that were seen, bans. Each list has a token once; bans may repeat.
        first_edit: i32,
        /// How many biases.
        biases: i32,
        /// How many tokens that were seen, which the penalties are about.
        seen: i32,
        /// How many bans.
        bans: i32,
        /// The row of the masks; −1: none.
        mask: i32,
        /// The token that is taken whatever the logits are; −1: none.
        forced: i32,
        /// 0: all.
        top_k: i32,
        /// How many of the likeliest tokens are wanted; −1: no log probabilities at all.
        top_n: i32,
        /// 0: the token with the largest logit.
        temperature: f32,
        /// 1: off.
        top_p: f32,
        /// 0: off.
        min_p: f32,
        /// The repetition penalty; 1: off.
        repetition: f32,
        /// The presence penalty; 0: off.
        presence: f32,
        /// The frequency penalty; 0: off.
        frequency: f32,
        /// Nothing: no byte of the struct is left undefined.
        unused: i32,
    }

    /// What became of a row, of cuda/llm/sampling.cuh.
    struct SamplingResult {
        /// The token; −1 if none is left: all logits are −∞ or NaN, or all tokens are banned.
        token: i32,
        /// Its place among the raw logits, from 1 on. This and the rest only if log probabilities are wanted.
        rank: i32,
        /// Its log probability by the raw logits.
        logprob: f32,
        /// How many of the likeliest tokens there are.
        top_count: i32,
        /// The likeliest tokens, the likeliest first.
        top_tokens: [u32; 20],
        /// Their log probabilities.
        top_logprobs: [f32; 20],
    }

    /// The slots of one layer, of cuda/llm/cache_policy.cu: addresses. What is known of them is `[states, heads, len]`.
    struct PolicyLayer {
        /// i32: the positions of the tokens in them; −1: none.
        positions: u64,
        /// f32; 0: no policy needs them, as the next two.
        scores: u64,
        /// f32: of values.
        lengths: u64,
        /// f32: of quantisation.
        errors: u64,
        /// i32: the places of slots, where a grace period moves them.
        places: u64,
        /// i32 `[total_rows, heads]`: the places of a step's tokens, which the plan writes.
        write_slots: u64,
        /// i32 `[total_rows, heads]`: their slots, the same.
        chosen: u64,
        /// i32 `[sequences, heads, len]`: the positions after the step's writes, the same.
        token_pos: u64,
        /// f32 `[sequences, heads, len]`: `key_weights` of the step.
        weights: u64,
        /// f32 `[total_rows, heads, 3]`: `kv_norms` of the step.
        norms: u64,
        /// Slots.
        len: i32,
        /// Nothing: no byte of the struct is left undefined.
        unused: i32,
    }

    /// What a step does with one layer of one sequence, of cuda/llm/cache_policy.cu. In a sequence's first step nothing of what is known
    /// counts.
    struct PolicyStep {
        /// Where its slots are known.
        state: i32,
        /// Its first row in the batch.
        row: i32,
        /// Its rows.
        rows: i32,
        /// Tokens before the step.
        seen: i32,
        /// Tokens of the first step.
        first: i32,
        /// 0: a ring; 1: the lowest numbers.
        rule: i32,
        /// Of a ring: the slots at the beginning that stay.
        kept: i32,
        /// Slots for the newest tokens.
        grace: i32,
        /// The part of the slots that the first eviction leaves alone, where the first step filled all of them.
        keep_initial: f32,
        /// Whether scores count by age.
        normalise: i32,
        /// Whether weights count by the lengths of values.
        by_length: i32,
        /// Whether errors count against scores.
        by_error: i32,
        /// How much scores count against errors.
        score_share: f32,
        /// Whether scores grow by weights.
        weighs: i32,
    }

    /// Of cuda/llm/cache_policy.cu.
    struct PolicyCall {
        layers: u64,
        steps: u64,
        layer_count: i32,
        sequences: i32,
        heads: i32,
        states: i32,
        total_rows: i32,
        unused: i32,
    }

    /// Of cuda/llm/sampling.cuh.
    struct SamplingCall {
        logits: u64,
        rows: u64,
        edits: u64,
        masks: u64,
        results: u64,
        scratch: u64,
        vocab: i32,
        logits_rows: i32,
        edit_count: i32,
        mask_rows: i32,
        fraction_bits: i32,
        slice: i32,
    }
}
