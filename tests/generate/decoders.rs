//! Graphs that know nothing of pages: decoders of other exporters, `tests/data/decoders`, and the functional form. Run as they are,
//! and rewritten when they are opened.

use std::path::{Path, PathBuf};

use pagoda::engine::{BeamOptions, Chat, EngineStore, GenerateRequest, Generator, GeneratorOptions, KvPolicy, Prompt};
use pagoda::folder::GenerateFolder;
use pagoda::folder::generate::{Form, PastPresent};
use pagoda::{ElementType, KvFormat, Model, ModelOptions, Provider, Status, Tensor};
use pagoda_test_support::{Folder, Random};
use serde_json::Value;

use super::cases::{self, VOCAB, greedy, options, prompt, stepped, tokens};
use super::folders::copy_of;

/// Decoders of other exporters, and how far the logits of a token may be from the largest: f16 rounds.
const DECODERS: [(&str, f32); 9] = [
    ("llama-optimum", 1e-3),
    ("qwen2-optimum", 1e-3),
    ("gemma3-optimum", 1e-3),
    ("llama-1-optimum-merged", 1e-3),
    ("llama-genai", 1e-3),
    ("llama-genai-unpacked", 1e-3),
    ("llama-genai-int4", 1e-3),
    ("llama-genai-dml", 0.2),
    ("qwen2-genai", 1e-3),
];
/// Tokens that a sequence of theirs may have.
const CONTEXT: usize = 128;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// A model in another form, and what it has to give.
struct Foreign {
    name: &'static str,
    files: Folder,
    tolerance: f32,
    /// Of a decoder of another exporter: its graph, for the oracle.
    graph: Option<(Model, PastPresent, GenerateFolder)>,
}

impl Foreign {
    fn decoder(name: &'static str, tolerance: f32) -> Self {
        let files = copy_of(&data("decoders").join(name));
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(data("llm/llama").join(file), files.path().join(file)).unwrap();
        }
        Self::open_decoder(name, files, tolerance)
    }

    fn open_decoder(name: &'static str, files: Folder, tolerance: f32) -> Self {
        let folder = GenerateFolder::open(files.path()).unwrap();
        let Form::PastPresent(names) = folder.form.clone() else { panic!("{:?}", folder.form) };
        let on_cpu = ModelOptions { provider: Provider::Cpu, intra_op_threads: 1, ..ModelOptions::default() };
        let model = Model::open(folder.file(&folder.model), &on_cpu).unwrap();
        Self { name, files, tolerance, graph: Some((model, names, folder)) }
    }

    fn functional() -> Self {
        let files = copy_of(&data("generate/llama-functional"));
        Self { name: "functional", files, tolerance: 1e-3, graph: None }
    }

    /// The same without rounding of inputs to 8 bits, which MatMulNBits does as `accuracy_level` says.
    fn without_rounding(name: &'static str, tolerance: f32) -> Self {
        let files = Self::decoder(name, tolerance).files;
        let file = files.path().join("model.onnx");
        let mut bytes = std::fs::read(&file).unwrap();
        let rounded = b"accuracy_level\x18\x04";
        let places: Vec<_> = (0..bytes.len() - rounded.len()).filter(|&at| bytes[at..].starts_with(rounded)).collect();
        assert_eq!(places.len(), 11, "products of {name}");
        places.iter().for_each(|at| bytes[at + rounded.len() - 1] = 0);
        std::fs::write(&file, bytes).unwrap();
        Self::open_decoder(name, files, tolerance)
    }

    /// All of them.
    fn all() -> impl Iterator<Item = Self> {
        DECODERS.into_iter().map(|(name, tolerance)| Self::decoder(name, tolerance)).chain([Self::functional()])
    }

    /// One of each way in which sequences lie in batches.
    fn kinds() -> impl Iterator<Item = Self> {
        let names = ["llama-optimum", "gemma3-optimum", "llama-1-optimum-merged", "qwen2-genai"];
        names.into_iter().map(|name| Self::decoder(name, 1e-3)).chain([Self::functional()])
    }

    fn open(&self, options: GeneratorOptions) -> Generator {
        let provider = Provider::Cpu;
        let model = ModelOptions { provider, ..options.model };
        let folder = GenerateFolder::open(self.files.path()).unwrap();
        Generator::open_folder(folder, GeneratorOptions { model, ..options }).unwrap()
    }

    /// The logits after each token, `[tokens, vocabulary]`: all in one run, without a past.
    fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        let Some((model, names, folder)) = &self.graph else {
            return (1..=tokens.len()).flat_map(|len| cases::oracle_logits(&tokens[..len])).collect();
        };
        let count = tokens.len() as i64;
        let numbers = |numbers: Vec<i64>| Tensor::from_slice(&[1, count], &numbers).unwrap();
        let ids = numbers(tokens.iter().map(|&token| token.into()).collect());
        let (positions, mask) = (numbers((0..count).collect()), numbers(vec![1; tokens.len()]));
        let branch = Tensor::from_bools(&[1], &[false]).unwrap();
        let kv = &folder.kv;
        let past = Tensor::zeros(kv.element, &[1, kv.heads.into(), 0, kv.head_size.into()]).unwrap();
        let mut fed: Vec<(&str, &Tensor)> = vec![(&names.input_ids, &ids), (&names.attention_mask, &mask)];
        fed.extend(names.position_ids.as_ref().map(|name| (name.as_str(), &positions)));
        fed.extend(names.use_cache_branch.as_ref().map(|name| (name.as_str(), &branch)));
        fed.extend(names.past_keys.iter().chain(&names.past_values).map(|name| (name.as_str(), &past)));
        let logits = &model.run(&fed, &[&names.logits]).unwrap()[0];
        match logits.element_type() {
            ElementType::F16 => logits.as_slice::<half::f16>().unwrap().iter().map(|logit| logit.to_f32()).collect(),
            _ => logits.as_slice::<f32>().unwrap().to_vec(),
        }
    }

    /// Checks that each of these tokens is the likeliest after the prompt and those before it.
    fn assert_greedy(&self, prompt: &[u32], made: &[u32], when: &str) {
        let all = [prompt, made].concat();
        let logits = self.logits(&all[..all.len() - 1]);
        for (at, &token) in made.iter().enumerate() {
            let row = &logits[(prompt.len() + at - 1) * VOCAB..][..VOCAB];
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let least = most - self.tolerance;
            assert!(row[token as usize] >= least, "{} {when}: token {at} of {made:?}, {most}", self.name);
        }
    }

    /// Prompts of these lengths, and the requests for some tokens after each.
    fn requests(lengths: &[usize], new_tokens: u32) -> Vec<GenerateRequest> {
        (0..).zip(lengths).map(|(seed, &len)| greedy(&prompt(seed, len), new_tokens)).collect()
    }

    /// Runs requests together, and checks their tokens.
    fn check_all(&self, generator: &Generator, requests: &[GenerateRequest], when: &str) {
        for (request, outcome) in requests.iter().zip(generator.generate_all(requests, |_| ())) {
            let response = outcome.unwrap_or_else(|error| panic!("{} {when}: {error}", self.name));
            for choice in &response.choices {
                self.assert_greedy(&response.prompt_tokens, &choice.tokens, when);
            }
            assert_eq!(response.choices[0].tokens.len(), request.max_new_tokens.unwrap() as usize);
        }
    }
}

/// Prompts, and the tokens that transformers has given for each.
fn expected(name: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
    let json = std::fs::read_to_string(data("decoders/expected.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    let known = json.as_object().unwrap().keys().filter(|kind| name.starts_with(&format!("{kind}-")));
    let ids = |case: &Value, key: &str| serde_json::from_value(case[key].clone()).unwrap();
    let cases = &json[known.max_by_key(|kind| kind.len()).unwrap()];
    cases.as_array().unwrap().iter().map(|case| (ids(case, "prompt_ids"), ids(case, "greedy_ids"))).collect()
}

#[test]
fn tokens_are_those_of_transformers() {
    for (name, tolerance) in DECODERS.into_iter().filter(|(name, _)| !name.ends_with("dml") && !name.ends_with("int4"))
    {
        let foreign = Foreign::decoder(name, tolerance);
        for max_batch_tokens in [1, 7, 32, 512] {
            let generator = foreign.open(GeneratorOptions { max_batch_tokens, ..options(64) });
            for (prompt, expected) in expected(name) {
                let made = tokens(&generator, &greedy(&prompt, expected.len() as u32));
                assert_eq!(
                    made,
                    expected,
                    "{name}, a prompt of {} tokens, {max_batch_tokens} rows a step",
                    prompt.len()
                );
            }
        }
        let generator = foreign.open(GeneratorOptions { max_stretch: 0.0, ..stepped(64) });
        let cases = expected(name);
        let requests: Vec<_> = cases.iter().map(|(prompt, made)| greedy(prompt, made.len() as u32)).collect();
        let streams: Vec<_> = requests.iter().map(|request| generator.stream(request).unwrap()).collect();
        while generator.step().unwrap() {}
        for (stream, (_, expected)) in streams.into_iter().zip(cases) {
            assert_eq!(stream.response().unwrap().choices[0].tokens, expected, "{name}, together");
        }
    }
}

#[test]
fn sequences_of_any_lengths_run_together() {
    let lengths = [1, 1, 2, 31, 32, 33, 64, 5, 90, 5];
    for foreign in Foreign::all() {
        for (share_prefixes, max_batch_tokens) in [(true, 512), (false, 40)] {
            let options = GeneratorOptions { share_prefixes, max_batch_tokens, max_stretch: 0.0, ..options(64) };
            let generator = foreign.open(options);
            let requests = Foreign::requests(&lengths, 30);
            foreign.check_all(&generator, &requests, "first");
            foreign.check_all(&generator, &requests, "again");
            generator.clear(true).unwrap();
            let kv = generator.kv_stats();
            assert_eq!((kv.free_pages, kv.resident_owners), (64, 0), "{}: {kv:?}", foreign.name);
        }
    }
}

#[test]
fn prefixes_are_shared() {
    for foreign in Foreign::kinds() {
        let generator = foreign.open(options(64));
        let mut long = prompt(3, 70);
        foreign.check_all(&generator, &[greedy(&long, 10)], "first");
        long.truncate(66);
        long.extend(prompt(9, 20));
        let response = generator.generate(&greedy(&long, 10)).unwrap();
        assert_eq!(response.cached_tokens, 64, "{}", foreign.name);
        foreign.assert_greedy(&long, &response.choices[0].tokens, "with a shared prefix");
        let request = GenerateRequest { n: Some(3), ..greedy(&long, 6) };
        foreign.check_all(&generator, &[request], "three answers");
    }
}

#[test]
fn conversations_go_on_also_after_a_restart() {
    for foreign in Foreign::kinds() {
        let store = Folder::new();
        let options = || GeneratorOptions {
            store: Some(EngineStore::new(store.path().join("store"))),
            host_bytes: 1 << 20,
            ..options(64)
        };
        let turn = |generator: &Generator, prompt: &[u32], when: &str| {
            let request = GenerateRequest { session: Some("anna".into()), ..greedy(prompt, 8) };
            let response = generator.generate(&request).unwrap();
            foreign.assert_greedy(prompt, &response.choices[0].tokens, when);
            (response.choices[0].tokens.clone(), response.cached_tokens)
        };
        let generator = foreign.open(options());
        let mut conversation = prompt(1, 40);
        for (when, cached) in [("first", 0), ("from the pool", 47), ("from host memory", 60)] {
            if when == "from host memory" {
                assert_eq!(generator.unload(&["anna"]).unwrap(), 1);
            }
            let (made, found) = turn(&generator, &conversation, when);
            assert_eq!(found, cached, "{} {when}", foreign.name);
            conversation.extend(made);
            conversation.extend(prompt(7, 5));
        }
        drop(generator);
        let generator = foreign.open(options());
        assert_eq!(turn(&generator, &conversation, "after a restart").1, 73, "{}", foreign.name);
        // What was edited is computed again, and not taken from what was kept for it.
        conversation[35] = (conversation[35] + 1) % 200;
        assert_eq!(turn(&generator, &conversation, "edited").1, 32, "{}", foreign.name);
    }
}

#[test]
fn pages_run_out_and_the_tokens_are_the_same() {
    let lengths = [40, 30, 20, 10];
    for foreign in Foreign::kinds() {
        for host_bytes in [0, 1 << 20] {
            let generator = foreign.open(GeneratorOptions { host_bytes, share_prefixes: false, ..options(6) });
            foreign.check_all(&generator, &Foreign::requests(&lengths, 80), "in 6 pages");
            assert!(generator.stats().preemptions > 0, "{}: {:?}", foreign.name, generator.stats());
        }
    }
}

#[test]
fn guesses_beams_and_draws_give_what_they_give_alone() {
    // What the others answer does not repeat, so that nothing is guessed for them.
    for foreign in Foreign::kinds().take(2) {
        let generator = foreign.open(GeneratorOptions { max_draft: 6, max_stretch: 0.0, ..options(64) });
        let base = prompt(2, 9);
        let requests: Vec<_> = (0..6).map(|n| greedy(&base.repeat(2 + n as usize % 3), 40)).collect();
        foreign.check_all(&generator, &requests, "with drafts");
        let stats = generator.stats();
        assert!(stats.drafted_tokens > 0, "{}: {stats:?}", foreign.name);

        // Beams part, share pages and end; one beam is the likeliest tokens.
        let beams = |width| {
            let request = GenerateRequest { beams: Some(BeamOptions::new(width)), ..greedy(&prompt(5, 35), 20) };
            generator.generate(&request).unwrap().choices[0].clone()
        };
        foreign.assert_greedy(&prompt(5, 35), &beams(1).tokens, "one beam");
        let (four, score) = (beams(4), |tokens: &[u32]| sum_of_logprobs(&foreign, &prompt(5, 35), tokens));
        let found = f64::from(four.score.unwrap()) * four.tokens.len() as f64;
        assert!((score(&four.tokens) - found).abs() < 1e-2, "{}: {four:?}", foreign.name);
        assert!(score(&four.tokens) >= score(&beams(1).tokens) - 1e-2, "{}: {four:?}", foreign.name);

        let drawn = |n: u64| GenerateRequest { do_sample: Some(true), seed: Some(n), ..greedy(&prompt(n, 20), 30) };
        let alone: Vec<_> = (0..5).map(|n| tokens(&generator, &drawn(n))).collect();
        let together = generator.generate_all(&(0..5).map(drawn).collect::<Vec<_>>(), |_| ());
        for (alone, together) in alone.iter().zip(together) {
            assert_eq!(*alone, together.unwrap().choices[0].tokens, "{}", foreign.name);
        }
    }
}

fn sum_of_logprobs(foreign: &Foreign, prompt: &[u32], made: &[u32]) -> f64 {
    let all = [prompt, made].concat();
    let logits = foreign.logits(&all);
    let of = |at: usize| {
        let row = &logits[(prompt.len() + at - 1) * VOCAB..][..VOCAB];
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        f64::from(row[made[at] as usize]) - sum.ln()
    };
    (0..made.len()).map(of).sum()
}

#[test]
fn log_probabilities_of_prompts_are_those_of_the_graph() {
    for foreign in Foreign::all() {
        let prompt = prompt(8, 40);
        let generator = foreign.open(options(64));
        let request = GenerateRequest { logprobs: Some(1), prompt_logprobs: Some(1), ..greedy(&prompt, 5) };
        let response = generator.generate(&request).unwrap();
        let made = &response.choices[0].tokens;
        let (all, tolerance) = ([&prompt[..], made].concat(), f64::from(foreign.tolerance));
        let of_answer = response.choices[0].logprobs.iter().map(Some);
        let found = response.prompt_logprobs.iter().map(Option::as_ref).chain(of_answer);
        for (at, found) in found.enumerate().skip(1) {
            let expected = sum_of_logprobs(&foreign, &all[..at], &all[at..=at]);
            let found = f64::from(found.unwrap().logprob);
            assert!((found - expected).abs() < tolerance, "{}, token {at}: {found}, {expected}", foreign.name);
        }
    }
}

#[test]
fn decoders_are_rewritten_for_pages_when_they_are_opened() {
    for (name, tolerance) in DECODERS {
        let foreign = match name {
            // Its products become BlockLinear, which rounds no inputs.
            "llama-genai-int4" => Foreign::without_rounding(name, tolerance),
            _ => Foreign::decoder(name, tolerance),
        };
        let open = |options: GeneratorOptions| Generator::open(foreign.files.path(), options).unwrap();
        let generator = open(options(64));
        assert_eq!(generator.folder().form, Form::Paged, "{name}");
        assert_eq!(generator.folder().version, foreign.graph.as_ref().unwrap().2.version, "{name}");
        foreign.check_all(&generator, &Foreign::requests(&[1, 2, 31, 32, 33, 64, 5, 90, 5], 30), "rewritten");
        if tolerance < 0.1 && !name.ends_with("int4") {
            for (prompt, expected) in expected(name) {
                assert_eq!(tokens(&generator, &greedy(&prompt, expected.len() as u32)), expected, "{name}");
            }
        }
        // What only graphs of pages can have.
        let quantised = open(GeneratorOptions { kv_format: Some(KvFormat::Int8), ..options(64) });
        assert_eq!(quantised.folder().kv.format, KvFormat::Int8, "{name}");
        assert_eq!(tokens(&quantised, &greedy(&prompt(3, 40), 10)).len(), 10);
        let few = open(GeneratorOptions { kv_policy: Some(KvPolicy::new("h2o", 32)), ..options(64) });
        assert_eq!(tokens(&few, &greedy(&prompt(3, 60), 10)).len(), 10, "{name}");
    }
}

#[test]
fn products_with_weights_of_4_bits_run_by_kernels_of_our_own() {
    let (foreign, folder) = (Foreign::decoder("llama-genai-int4", 0.0), Folder::new());
    let profile_path = Some(folder.path().join("profile.json"));
    let model = ModelOptions { profile_path, ..options(64).model };
    let generator = Generator::open(foreign.files.path(), GeneratorOptions { model, ..options(64) }).unwrap();
    assert_eq!(tokens(&generator, &greedy(&prompt(3, 40), 1)).len(), 1);
    drop(generator);
    let profile = std::fs::read_to_string(folder.path().join("profile.json")).unwrap();
    let ran = |operator: &str| profile.matches(&format!(r#""op_name" : "{operator}""#)).count();
    // Of eleven, the two of 48 columns are in no whole blocks.
    assert_eq!(["BlockLinear", "MatMulNBits"].map(ran), [9, 2]);
}

/// What one form has stored the other goes on with: both keep keys after their rotation.
#[test]
fn a_conversation_goes_on_whether_its_decoder_is_rewritten_or_not() {
    for foreign in Foreign::kinds().filter(|foreign| foreign.graph.is_some()) {
        let store = Folder::new();
        let options = || GeneratorOptions { store: Some(EngineStore::new(store.path().join("store"))), ..options(64) };
        let mut conversation = prompt(1, 40);
        for (turn, cached) in [0, 47, 60, 73].into_iter().enumerate() {
            let generator = match turn % 2 {
                0 => foreign.open(options()),
                _ => Generator::open(foreign.files.path(), options()).unwrap(),
            };
            let request = GenerateRequest { session: Some("anna".into()), ..greedy(&conversation, 8) };
            let response = generator.generate(&request).unwrap();
            assert_eq!(response.cached_tokens, cached, "{}, turn {turn}", foreign.name);
            foreign.assert_greedy(&conversation, &response.choices[0].tokens, "in turns");
            conversation.extend(&response.choices[0].tokens);
            conversation.extend(prompt(7, 5));
        }
    }
}

/// Sequences that join, leave and are cancelled at any step.
#[test]
fn batches_that_change_all_the_time_keep_their_tokens() {
    for foreign in Foreign::kinds() {
        let generator =
            foreign.open(GeneratorOptions { max_batch: 6, max_batch_tokens: 50, max_draft: 3, ..stepped(14) });
        let mut random = Random(4);
        let mut streams = Vec::new();
        for _ in 0..300 {
            if random.below(4) == 0 && streams.len() < 9 {
                let len = 1 + random.below(60);
                let prompt = prompt(random.below(5) as u64, len);
                let request = greedy(&prompt, 1 + random.below((CONTEXT - len).min(50)) as u32);
                streams.push((prompt, generator.stream(&request).unwrap()));
            }
            if random.below(20) == 0 && !streams.is_empty() {
                streams.swap_remove(random.below(streams.len()));
            }
            generator.step().unwrap();
        }
        while generator.step().unwrap() {}
        assert!(!streams.is_empty());
        for (prompt, stream) in streams {
            foreign.assert_greedy(&prompt, &stream.response().unwrap().choices[0].tokens, "in a batch that changes");
        }
        generator.clear(true).unwrap();
        assert_eq!(generator.kv_stats().free_pages, 14, "{}", foreign.name);
    }
}

#[test]
fn texts_and_chats_are_taken() {
    let foreign = Foreign::decoder("llama-genai", 1e-3);
    let generator = foreign.open(options(64));
    let (case, _) = &expected("llama-genai")[2];
    // The tokenizer adds the first token, as the prompt there has it.
    let text = Prompt::Text("In the beginning there was a plain, and on it one horse.".into());
    assert_eq!(generator.tokens(&text).unwrap(), *case);
    let message = serde_json::json!({"role": "user", "content": "a"});
    assert!(!generator.tokens(&Prompt::Chat(Chat::new(vec![message]))).unwrap().is_empty());
}

#[test]
fn what_a_form_can_not_have_is_refused_by_name() {
    for foreign in Foreign::kinds() {
        let refused = |options: GeneratorOptions, option: &str, message: &str| {
            let folder = GenerateFolder::open(foreign.files.path()).unwrap();
            let otherwise = match folder.form {
                Form::Functional(_) => "or export the model without --form functional",
                _ => "or see `pagoda inspect`",
            };
            let error = Generator::open_folder(folder, options).err().expect("it is refused");
            assert_eq!((error.status(), error.argument()), (Status::Unsupported, Some(option)), "{error}");
            assert!(error.message().contains(message) && error.message().contains(otherwise), "{error}");
        };
        let quantised = GeneratorOptions { kv_format: Some(KvFormat::Int8), ..options(64) };
        refused(quantised, "options.kv_format", "which reads keys and values as it has made them");
        let policy = KvPolicy::new("lastrec", 32);
        let with_policy = GeneratorOptions { kv_policy: Some(policy), ..options(64) };
        refused(with_policy, "options.kv_policy", "which has no slots that a policy could choose");
        let model = ModelOptions { provider: Provider::Cuda, ..ModelOptions::default() };
        let on_gpu = GeneratorOptions { model, ..options(64) };
        refused(on_gpu, "options.model.provider", "which runs on the CPU alone, with pages in host memory");
        let native = GeneratorOptions { kv_format: Some(KvFormat::Native), ..options(64) };
        assert_eq!(foreign.open(native).provider().provider, Provider::Cpu);
    }
}

#[test]
fn a_graph_without_what_its_folder_names_is_refused_when_it_is_opened() {
    let foreign = Foreign::functional();
    super::folders::change(&foreign.files, |about| about["outputs"]["new_keys"][1] = "other".into());
    let error = Generator::open(foreign.files.path(), options(64)).err().unwrap();
    assert_eq!((error.status(), error.argument()), (Status::Model, Some("folder")), "{error}");
    assert!(error.message().contains("model.onnx: the graph has no output \"other\""), "{error}");
}

#[test]
fn one_model_drafts_for_another_in_any_form() {
    let functional = data("generate/llama-functional");
    for (main, draft) in [(cases::folder(), functional.clone()), (functional, cases::folder())] {
        let options = GeneratorOptions { draft_model: Some(draft), max_draft: 4, ..options(64) };
        let model = ModelOptions { provider: Provider::Cpu, ..options.model.clone() };
        let generator = Generator::open(main, GeneratorOptions { model, ..options }).unwrap();
        for n in 0..4 {
            let request = greedy(&prompt(n, 10 + n as usize), 30);
            assert_eq!(tokens(&generator, &request), cases::oracle(&prompt(n, 10 + n as usize), 30));
        }
        let stats = generator.stats();
        assert!(stats.accepted_tokens > 0, "it is the same model: {stats:?}");
    }
}
