//! Every call matches the reference, on both providers.

use std::sync::atomic::{AtomicU64, Ordering};

use pagoda::{ElementType, Model, ModelOptions, Provider, Tensor};
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{bf16, f16};
use pagoda_test_support::{Dim, Folder, Graph, I32};

use crate::common::golden::{Golden, rounded};
use crate::common::{self, Case, Random, User, bits, error, only, tolerance};
use crate::operators::{Inputs, Number, attributes, graph, graphs, options};
use crate::placement;

/// Runs a case with the pools apart and in place, and compares both with the reference.
fn check<T: Number>(case: &Case<T>, provider: Provider, what: &str) {
    let expected = reference::hstu_attention(&case.attention()).unwrap();
    check_with(case, &expected, provider, what);
}

fn check_with<T: Number>(case: &Case<T>, expected: &[f64], provider: Provider, what: &str) {
    let what = format!("{what} {} D={} {:?}", T::NAME, case.head_size, case.users);
    let outputs = graphs(case).map(|(nodes, graph)| {
        let model = Model::open_memory(&graph, &options(provider)).unwrap();
        assert_eq!(model.provider(), provider);
        check_model(&model, case, expected, &format!("{what} {nodes}"))
    });
    assert!(bits(&outputs[0]) == bits(&outputs[1]), "{what}: one node and two");
}

fn check_model<T: Number>(model: &Model, case: &Case<T>, expected: &[f64], what: &str) -> Vec<T> {
    let inputs = Inputs::new(case);
    let (output, pool) = inputs.run::<T>(model).unwrap_or_else(|error| panic!("{what}: {error}"));
    let error = error(&output, expected);
    assert!(error <= tolerance::<T>(), "{what}: error {error:e}");
    let mut appended = case.pool.clone();
    reference::paged_kv_append(&case.append(), &mut appended).unwrap();
    assert!(bits(&pool) == bits(&appended), "{what}: the pool");
    // Twice: the same rows are written again.
    for round in 0..2 {
        assert!(bits(&inputs.run_in_place::<T>(model).unwrap()) == bits(&output), "{what}: in place, round {round}");
        let pool = inputs.pool.as_slice::<T>().unwrap();
        assert!(bits(pool) == bits(&appended), "{what}: the pool in place, round {round}");
    }
    output
}

pub fn golden(provider: Provider) {
    for Golden { name, case, expected_output, expected_pool } in common::golden::golden() {
        check_with(&case, &expected_output, provider, &name);
        let mut pool = case.pool.clone();
        reference::paged_kv_append(&case.append(), &mut pool).unwrap();
        assert!(bits(&pool) == bits(&expected_pool), "{name}: the reference");
        check(&rounded::<f16>(&case), provider, &name);
        check(&rounded::<bf16>(&case), provider, &name);
    }
}

pub fn random(provider: Provider) {
    // The CPU kernels have their own tests of this kind. Here a few calls show that the operators pass arguments on.
    let seeds = if provider == Provider::Cpu { 8 } else { 48 };
    spread(seeds, |seed| {
        check(&common::random_case::<f32>(seed), provider, &format!("seed {seed}"));
        check(&random_case_of::<f16>(seed), provider, &format!("seed {seed}"));
        check(&random_case_of::<bf16>(seed), provider, &format!("seed {seed}"));
    });
}

/// Does `work` for every number below `count`, on eight threads.
fn spread(count: u64, work: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|number| *number < count) {
                    work(number);
                }
            });
        }
    });
}

/// Every second one has a head size of the fast GPU kernels.
fn random_case_of<T: Number>(seed: u64) -> Case<T> {
    let case = common::random_case::<T>(seed);
    if seed.is_multiple_of(2) {
        return case;
    }
    let mut random = Random(seed ^ 0xfa57);
    let head_size = random.pick(&[32, 64, 128, 256]);
    let mut fast = Case::new(&mut random, &case.users, case.heads, head_size, case.page_size);
    (fast.alpha, fast.scaling_seqlen) = (case.alpha, case.scaling_seqlen);
    (fast.target_group_size, fast.max_attn_len) = (case.target_group_size, case.max_attn_len);
    fast
}

/// Few rows over thousands of tokens: split-KV on a GPU.
pub fn long(provider: Provider) {
    let users = [(2000, 5, 12), (1500, 0, 7), (10, 90, 0)];
    let users = users.map(|(cached, new, candidates)| User { cached, new, candidates, contextual: 0 });
    check(&Case::<f16>::new(&mut Random(1), &users, 1, 64, 32), provider, "long");
    check(&Case::<bf16>::new(&mut Random(2), &users, 1, 128, 64), provider, "long");
    check(&Case::<f32>::new(&mut Random(3), &users, 1, 32, 8), provider, "long");
}

/// A graph without a cache, with and without contextual rows.
pub fn without_cache(provider: Provider) {
    fn check<T: Number>(contextual: usize, provider: Provider) {
        let users = [(9, 4, 1), (0, 3, 0), (70, 0, 1)];
        let users =
            users.map(|(new, candidates, some)| User { cached: 0, new, candidates, contextual: some * contextual });
        let case = Case::<T>::new(&mut Random(5), &users, 2, 64, 8);
        let expected = reference::hstu_attention(&case.attention()).unwrap();
        let rows = || [Dim::Any("rows"), Dim::Is(2), Dim::Is(64)];
        let mut names = vec!["query", "key", "value", "row_offsets", "num_candidates"];
        let mut graph = names[..3].iter().fold(Graph::new(), |graph, name| graph.input(name, T::TYPE as i32, &rows()));
        graph = names[3..].iter().fold(graph, |graph, name| graph.input(name, I32, &[Dim::Any(name)]));
        if contextual > 0 {
            graph = graph.input("num_contextual", I32, &[Dim::Any("users")]);
            names.extend(["", "", "", "", "num_contextual"]);
        }
        let graph = graph.output("output", T::TYPE as i32, &rows());
        let graph = graph.node("ai.pagoda.HstuAttention", &names, &["output"], &attributes(&case)).to_bytes();
        let model = Model::open_memory(&graph, &options(provider)).unwrap();
        let inputs = Inputs::new(&case);
        let used = inputs.tensors.iter().filter(|(name, _)| names.contains(name));
        let fed: Vec<(&str, &Tensor)> = used.map(|(name, tensor)| (*name, tensor)).collect();
        let made = model.run(&fed, &["output"]).unwrap();
        let error = error(made[0].as_slice::<T>().unwrap(), &expected);
        assert!(error <= tolerance::<T>(), "{} contextual {contextual}: error {error:e}", T::NAME);
    }
    for contextual in [0, 3] {
        check::<f32>(contextual, provider);
        check::<f16>(contextual, provider);
        check::<bf16>(contextual, provider);
    }
}

/// Several threads run one model with different calls; each gives the same result as alone.
pub fn at_the_same_time(provider: Provider) {
    let cases: Vec<Case<bf16>> = (0..8)
        .map(|seed| {
            let mut random = Random(seed);
            let user = |random: &mut Random| User {
                cached: random.below(2000),
                new: random.below(60),
                candidates: 1 + random.below(60),
                contextual: 0,
            };
            let users: Vec<User> = (0..1 + random.below(3)).map(|_| user(&mut random)).collect();
            Case::new(&mut random, &users, 1, 64, 32)
        })
        .collect();
    let model = Model::open_memory(&graph(&cases[0]), &options(provider)).unwrap();
    let alone: Vec<_> = cases.iter().map(|case| Inputs::new(case).run::<bf16>(&model).unwrap()).collect();
    let rounds = if provider == Provider::Cpu { 16 } else { 200 };
    spread(rounds, |round| {
        let at = round as usize % cases.len();
        let inputs = Inputs::new(&cases[at]);
        let (output, pool) = inputs.run::<bf16>(&model).unwrap();
        let in_place = inputs.run_in_place::<bf16>(&model).unwrap();
        for output in [output, in_place] {
            assert!(bits(&output) == bits(&alone[at].0), "round {round}");
        }
        for pool in [&pool[..], inputs.pool.as_slice().unwrap()] {
            assert!(bits(pool) == bits(&alone[at].1), "round {round}: the pool");
        }
    });
}

/// One pool, in which each of several threads has its own pages: no rows are lost.
pub fn one_pool_for_all(provider: Provider) {
    let users: Vec<User> = (0..12).map(|n| User { cached: 8 * n, new: 5 + n, candidates: 2, contextual: 0 }).collect();
    let case = Case::<bf16>::new(&mut Random(13), &users, 2, 64, 16);
    let mut expected = case.pool.clone();
    reference::paged_kv_append(&case.append(), &mut expected).unwrap();
    let rounds = if provider == Provider::Cpu { 2 } else { 20 };
    for ((nodes, graph), host_pools) in graphs(&case).iter().flat_map(|graph| [(graph, false), (graph, true)]) {
        let options = ModelOptions { host_pools, ..options(provider) };
        let model = Model::open_memory(graph, &options).unwrap();
        for round in 0..rounds {
            let pool = Inputs::new(&case).pool;
            spread(users.len() as u64, |user| {
                let part = only(&case, &[user as usize]);
                let output = Inputs::new(&part).run_in_place_on::<bf16>(&model, &pool).unwrap();
                let error = error(&output, &reference::hstu_attention(&part.attention()).unwrap());
                assert!(error <= tolerance::<bf16>(), "user {user} {nodes} host_pools {host_pools}: error {error:e}");
            });
            let same = bits(pool.as_slice::<bf16>().unwrap()) == bits(&expected);
            assert!(same, "round {round} {nodes} host_pools {host_pools}: rows are lost");
        }
    }
}

pub fn nodes_run_there(provider: Provider) {
    nodes_run_on(placement::name(provider), options(provider));
    nodes_run_on(placement::name(Provider::Cpu), ModelOptions { host_pools: true, ..options(provider) });
}

fn nodes_run_on(expected: &str, options: ModelOptions) {
    let folder = Folder::new();
    fn run<T: Number>(options: &ModelOptions) {
        let case =
            Case::<T>::new(&mut Random(9), &[User { cached: 9, new: 3, candidates: 2, contextual: 0 }], 1, 32, 8);
        let model = Model::open_memory(&graph(&case), options).unwrap();
        Inputs::new(&case).run::<T>(&model).unwrap();
    }
    let options = &options;
    let runs: [fn(&ModelOptions); 3] = [run::<f32>, run::<f16>, run::<bf16>];
    for run in runs {
        let path = folder.path().join("profile.json");
        run(&ModelOptions { profile_path: Some(path.clone()), ..options.clone() });
        placement::check(&path, expected, &["HstuAttention", "PagedKvAppend"]);
    }
}

/// What the host can check is checked on both providers, with a message.
pub fn bad_shapes(provider: Provider) {
    let users = [User { cached: 9, new: 3, candidates: 2, contextual: 1 }, User { contextual: 0, ..User::default() }];
    let mut case = Case::<f32>::new(&mut Random(11), &users, 2, 8, 8);
    case.num_contextual = Some(vec![0, 0]);
    for (nodes, graph) in graphs(&case) {
        bad_shapes_of(&Model::open_memory(&graph, &options(provider)).unwrap(), &case, nodes);
    }
}

fn bad_shapes_of(model: &Model, case: &Case<f32>, nodes: &str) {
    let refused = |name: &str, tensor: Tensor, words: &[&str]| {
        let mut inputs = Inputs::new(case);
        *inputs.tensors.iter_mut().map(|(at, tensor)| (*at, tensor)).find(|(at, _)| *at == name).unwrap().1 = tensor;
        let error = inputs.run::<f32>(model).unwrap_err();
        for word in words {
            assert!(error.message().contains(word), "{nodes} {name}: {error}");
        }
    };
    let ints = |len: i64| Tensor::zeros(ElementType::I32, &[len]).unwrap();
    let rows = |dims: &[i64]| Tensor::zeros(ElementType::F32, dims).unwrap();
    Inputs::new(case).run::<f32>(model).unwrap();
    refused("row_offsets", ints(2), &["row_offsets", "2", "3"]);
    refused("cached_len", ints(3), &["cached_len", "3", "2"]);
    refused("page_indptr", ints(2), &["page_indptr", "2", "3"]);
    refused("num_contextual", ints(1), &["num_contextual", "1", "2"]);
    refused("key", rows(&[5, 2, 9]), &["key", "[5, 2, 9]", "[5, 2, 8]"]);
    refused("value", rows(&[4, 2, 8]), &["value", "[4, 2, 8]", "[5, 2, 8]"]);
    refused("query", rows(&[5, 1, 16]), &["[5, 1, 16]"]);
}
