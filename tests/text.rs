//! The tokenizer and the chat template of a real model, SmolLM2, against references: llama.cpp and transformers gave the
//! same ids for 1,000 strings of every script (`tests/data/llm/make_tokenizer_smollm2.py`).

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagoda::text::{ChatInput, ChatTemplate, Detokeniser, Tokenizer};
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn folder() -> PathBuf {
    root().join("target/models/smollm2")
}

#[test]
#[ignore = "needs `make model-smollm2`, which fetches 93 MB"]
fn smollm2_encodes_decodes_and_detokenises_as_the_references() {
    let tokenizer = Arc::new(Tokenizer::from_file(folder().join("tokenizer.json")).unwrap());
    assert_eq!(tokenizer.vocab_size(), 49_152);
    let text = std::fs::read(root().join("tests/data/llm/tokenizer-smollm2.json")).unwrap();
    let reference: Value = serde_json::from_slice(&text).unwrap();
    let strings = reference["strings"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    let ids = reference["ids"].as_array().unwrap().iter();
    let ids = ids.map(|ids| ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<u32>>());
    // The vocabulary has no token for some bytes, which encoding leaves out.
    let spelt: HashSet<u8> = (0..49_152)
        .filter_map(|id| match tokenizer.token_bytes(id)? {
            [byte] => Some(*byte),
            _ => None,
        })
        .collect();
    let mut count = 0;
    let mut detokeniser = Detokeniser::new(tokenizer.clone(), false);
    for (text, ids) in strings.zip(ids) {
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
        let whole = tokenizer.decode(&ids, false).unwrap();
        let mut pieces: String = ids.iter().map(|&id| detokeniser.push(id).unwrap()).collect();
        pieces += &detokeniser.finish().unwrap();
        assert_eq!(pieces, whole);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).copied().collect();
        assert_eq!(String::from_utf8_lossy(&bytes), whole);
        count += 1;
        assert_eq!(whole == text, text.bytes().all(|byte| spelt.contains(&byte)), "{text:?}");
    }
    assert_eq!(count, 1000);
}

#[test]
#[ignore = "needs `make model-smollm2`, which fetches 93 MB"]
fn smollm2_has_a_default_system_message() {
    let source = std::fs::read_to_string(folder().join("chat_template.jinja")).unwrap();
    let template = ChatTemplate::new(&source, &[]).unwrap();
    let messages = [json!({"role": "user", "content": "Hi"})];
    let text = template
        .render(&ChatInput { messages: &messages, add_generation_prompt: true, ..ChatInput::default() })
        .unwrap();
    let system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
    let expected =
        format!("<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(text, expected);
}
