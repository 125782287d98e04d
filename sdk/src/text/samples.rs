//! Tokenizers and texts for tests: one small tokenizer for each kind of decoder.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::tokenizer::Tokenizer;

/// Texts of many scripts, with combining marks, joiners, flags, and bytes that tokenizers treat in their own way.
pub(super) const TEXTS: &[&str] = &[
    "The quick brown fox jumps over the lazy dog.",
    " leading and trailing ",
    "  two  spaces,\ttabs\r\nand\n\n\nlines ",
    "naïve façade, Ærøskøbing, Žižek, ﬁ ligature, ẞ",
    "Быстрая лиса и ленивая собака",
    "Η γρήγορη αλεπού ἀπὸ τὸν λόγον",
    "素早い茶色の狐がのろまな犬を飛び越える。ｶﾅ",
    "敏捷的棕毛狐狸从懒狗身上跃过，𠮷野家",
    "빠른 갈색 여우 각",
    "الثعلب البني السريع يقفز",
    "שָׁלוֹם עולם",
    "क्षत्रिय हिन्दी தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල",
    "ภาษาไทย ພາສາລາວ မြန်မာ ភាសាខ្មែរ བོད་སྐད",
    "Հայերեն ქართული አማርኛ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇺🇳🇪🇺 1️⃣ ❤️‍🔥 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u{301} Z\u{335}\u{321}\u{352} \u{200b}\u{200d}\u{feff}\u{202e}x",
    "∑∫√∞ ≠ ½ ² ₁ Ⅷ ① \u{1d538}\u{1d7d8}",
    "\u{0}\u{1}\u{7f}\u{80}\u{a0}\u{ad}\u{10ffff}",
    "<0x0A> <0xE2> Ġ Ċ",
    "if (a && b) { return \"x\\n\"; } // don't",
];

/// One tokenizer for each kind of decoder, with its name.
pub(super) fn tokenizers() -> Vec<(&'static str, Arc<Tokenizer>)> {
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let fallback = json!({"type": "ByteFallback"});
    let fuse = json!({"type": "Fuse"});
    let metaspace =
        |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    let sequence = |decoders: &[&Value]| json!({"type": "Sequence", "decoders": decoders});
    let strip = |start: usize, stop: usize| json!({"type": "Strip", "content": "a", "start": start, "stop": stop});
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let ctc = json!({"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": false});
    vec![
        ("byte level", byte_level()),
        ("byte fallback", byte_fallback()),
        ("byte fallback without strip", make(sequence(&[&replace, &fallback, &fuse]))),
        ("byte fallback, fuse, replace", make(sequence(&[&fallback, &fuse, &replace, &strip(2, 0)]))),
        ("metaspace", make(metaspace("always"))),
        ("metaspace never", make(metaspace("never"))),
        ("byte fallback and metaspace", make(sequence(&[&fallback, &metaspace("first")]))),
        ("byte fallback, fuse, metaspace", make(sequence(&[&fallback, &fuse, &metaspace("first")]))),
        ("strip each", make(sequence(&[&strip(1, 0), &fuse]))),
        ("byte level in a sequence", make(sequence(&[&level, &strip(3, 0)]))),
        ("word piece", make(json!({"type": "WordPiece", "prefix": "##", "cleanup": true}))),
        ("suffix", make(json!({"type": "BPEDecoder", "suffix": "</w>"}))),
        ("no decoder", make(Value::Null)),
        ("whole text", make(ctc)),
    ]
}

/// Whether every text can be encoded and comes back as it was.
pub(super) fn spells_everything(name: &str) -> bool {
    ["byte level", "byte fallback"].contains(&name)
}

/// The tokenizer of the small language models in `tests/data`: byte-level BPE.
pub(super) fn byte_level() -> Arc<Tokenizer> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llm/llama/tokenizer.json");
    Arc::new(Tokenizer::from_file(path).unwrap())
}

/// A tokenizer built as that of Llama 2.
pub(super) fn byte_fallback() -> Arc<Tokenizer> {
    make(json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]}))
}

fn make(decoder: Value) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_bytes(json_of(decoder).to_string().as_bytes()).unwrap())
}

/// A `tokenizer.json` with the bytes, a few words and special tokens.
pub(super) fn json_of(decoder: Value) -> Value {
    let words = [
        "▁", "▁▁", "▁the", "▁a", "the", "a", "b", "t", "h", "e", "é", "日", "👍", "\u{200d}", "##ing", "do", "not",
        "n't", ".", "end</w>", "</w>", "Ã", "©", "Ġhi", "Ċ", "\u{fffd}", "<0x0>", "ą",
    ];
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>")));
    tokens.extend(words.map(str::to_owned));
    let mut vocab: Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    // Behind a gap.
    vocab.insert("far".to_owned(), json!(tokens.len() + 20));
    let added = |id: usize, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": special})
    };
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<unk>"},
        "added_tokens": [
            added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true),
            added(tokens.len(), "<tool ▁日>", false), added(tokens.len() + 7, "<|end|>", true),
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}
