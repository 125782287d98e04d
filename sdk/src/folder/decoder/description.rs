//! What a pagoda.json says of a decoder: of one that has none, for programs that read it, and of one that was converted.

use serde_json::{Map, Value, json};

use super::super::generate::folder::{GenerateFolder, Inputs, Outputs};
use super::super::generate::form::{Form, Functional, PastPresent};

/// The folder, with its description in place of the text of a pagoda.json.
pub(super) fn described(mut folder: GenerateFolder) -> GenerateFolder {
    let text = description(&folder).to_string();
    folder.contents.describe(text);
    folder
}

/// Of a folder with native pages.
pub(in super::super) fn description(folder: &GenerateFolder) -> Value {
    let GenerateFolder { attention, kv, tokens, text, .. } = folder;
    let (inputs, outputs) = match &folder.form {
        Form::PastPresent(names) => sides(names),
        Form::Paged => paged_sides(&folder.inputs, &folder.outputs),
        Form::Functional(names) => functional_sides(names),
    };
    let files = folder.files.iter().map(|file| {
        let about = json!({"bytes": file.bytes, "sha256": file.sha256});
        (file.name.clone(), about)
    });
    json!({
        "format": 1,
        "kind": folder.kind.name(),
        "version": folder.version,
        "form": folder.form.name(),
        "model": folder.model,
        "architecture": folder.architecture,
        "compute": folder.compute.name(),
        "weights": folder.weights.name(),
        "vocab_size": folder.vocab_size,
        "hidden_size": folder.hidden_size,
        "attention": {"layers": attention.layers, "heads": attention.heads, "windows": attention.windows},
        "kv": {
            "layers": kv.layers,
            "heads": kv.heads,
            "head_size": kv.head_size,
            "page_size": kv.page_size,
            "type": kv.element.name(),
            "format": kv.format_name(),
            "bytes_per_token": kv.bytes_per_token,
        },
        "limits": {"max_context": folder.limits.max_context},
        "tokens": {
            "bos": tokens.bos, "eos": tokens.eos, "pad": tokens.pad, "unk": tokens.unk, "add_bos": tokens.add_bos,
        },
        "generation": generation(folder),
        "text": {
            "tokenizer": text.tokenizer,
            "chat_template": text.chat_template,
            "template_tokens": Map::from_iter(text.template_tokens.iter().map(|(name, text)| (name.clone(), json!(text)))),
        },
        "inputs": inputs,
        "outputs": outputs,
        "files": Map::from_iter(files),
    })
}

fn sides(names: &PastPresent) -> (Value, Value) {
    let inputs = json!({
        "input_ids": names.input_ids,
        "attention_mask": names.attention_mask,
        "position_ids": names.position_ids,
        "use_cache_branch": names.use_cache_branch,
        "past_keys": names.past_keys,
        "past_values": names.past_values,
    });
    let outputs = json!({
        "logits": names.logits,
        "present_keys": names.present_keys,
        "present_values": names.present_values,
    });
    (inputs, outputs)
}

fn paged_sides(inputs: &Inputs, outputs: &Outputs) -> (Value, Value) {
    let inputs = json!({
        "input_ids": inputs.input_ids,
        "positions": inputs.positions,
        "row_offsets": inputs.row_offsets,
        "cached_len": inputs.cached_len,
        "page_indptr": inputs.page_indptr,
        "page_ids": inputs.page_ids,
        "logits_rows": inputs.logits_rows,
        "kv_pools": inputs.kv_pools,
        "kv_scales": inputs.kv_scales,
    });
    let outputs = json!({"logits": outputs.logits, "kv_pools": outputs.kv_pools, "kv_scales": outputs.kv_scales});
    (inputs, outputs)
}

fn functional_sides(names: &Functional) -> (Value, Value) {
    let inputs = json!({
        "input_ids": names.input_ids,
        "position_ids": names.position_ids,
        "key_slots": names.key_slots,
        "value_slots": names.value_slots,
        "attention_mask": names.attention_mask,
        "kv_pools": names.kv_pools,
    });
    (inputs, json!({"logits": names.logits, "new_keys": names.new_keys, "new_values": names.new_values}))
}

/// Only what is set.
fn generation(folder: &GenerateFolder) -> Value {
    let generation = &folder.generation;
    let all = json!({
        "do_sample": generation.do_sample,
        "temperature": generation.temperature,
        "top_k": generation.top_k,
        "top_p": generation.top_p,
        "min_p": generation.min_p,
        "repetition_penalty": generation.repetition_penalty,
        "no_repeat_ngram_size": generation.no_repeat_ngram_size,
        "max_new_tokens": generation.max_new_tokens,
        "min_new_tokens": generation.min_new_tokens,
    });
    let Value::Object(mut all) = all else { return all };
    all.retain(|_, value| !value.is_null());
    Value::Object(all)
}
