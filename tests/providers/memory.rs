//! Out of GPU memory: the error says so, and smaller calls still work.

use std::sync::Arc;

use pagoda::device::{DeviceMemory, Gpu};
use pagoda::engine::EngineOptions;
use pagoda::kv::{KvRequest, Owner, Owners};
use pagoda::store::HostStore;
use pagoda::{ElementType, Engine, KvCache, KvOptions, KvSize, Model, ModelOptions, Provider, Status};
use pagoda_kernels::cpu::reference;

use crate::cases::{folder, open, options};
use crate::common::{Case, Random, User, error, tolerance};
use crate::operators::{self, Inputs, graph};

const MEBIBYTE: usize = 1 << 20;
const GIBIBYTE: usize = 1 << 30;

/// Allocates GPU memory except for about this many bytes, until it is dropped.
fn take_all_but(left: usize) -> Vec<DeviceMemory> {
    let gpu = Gpu::shared(0).unwrap();
    let (mut taken, mut size) = (Vec::new(), 64 * GIBIBYTE);
    while size >= 8 * MEBIBYTE {
        let fits = gpu.free_bytes().unwrap() >= left + size;
        match fits.then(|| DeviceMemory::zeroed(gpu, size)) {
            Some(Ok(memory)) => taken.push(memory),
            _ => size /= 2,
        }
    }
    taken
}

fn on_gpu(size: KvSize) -> EngineOptions {
    let model = ModelOptions { provider: Provider::Cuda, ..options().model };
    EngineOptions { model, kv_size: Some(size), ..options() }
}

#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn pages_that_do_not_fit_are_refused_and_fewer_are_not() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let _taken = take_all_but(GIBIBYTE);
    let of = |bytes: usize| KvOptions {
        layers: 2,
        heads: 4,
        head_size: 128,
        page_size: 64,
        element_type: ElementType::F32,
        size: KvSize::Bytes(bytes as u64),
        device_id: Some(0),
        ..KvOptions::default()
    };
    let pool = |bytes: usize| KvCache::open(&of(bytes), None);
    let error = pool(8 * GIBIBYTE).err().expect("there is no room for it");
    assert_eq!((error.status(), error.argument()), (Status::Capacity, Some("size")), "{error}");
    let layer = (4 * GIBIBYTE).to_string();
    assert!(error.message().contains(&layer) && error.message().contains("fewer pages"), "{error}");
    assert!(pool(256 * MEBIBYTE).is_ok());
    // Of what is free, about a GiB.
    let options = KvOptions { size: KvSize::Percent(20), ..of(0) };
    let free = Gpu::shared(0).unwrap().free_bytes().unwrap();
    let share = KvCache::open(&options, None).unwrap();
    let bytes = share.stats().pages as usize * 2 * 2 * 64 * 4 * 128 * 4;
    assert!((free / 6..=free / 5).contains(&bytes), "{bytes} of {free}");
    drop(share);

    let refused = Engine::open(folder("gather"), on_gpu(KvSize::Bytes(4 * GIBIBYTE as u64)));
    let error = refused.err().expect("there is no room for it");
    assert_eq!((error.status(), error.argument()), (Status::Capacity, Some("options.kv_size")), "{error}");
    crate::engine::replay(&open("gather", on_gpu(KvSize::Pages(256))), "gather");
}

#[test]
#[ignore = "needs a GPU"]
fn histories_leave_and_come_back_where_no_memory_is_left() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let options = KvOptions {
        layers: 2,
        heads: 1,
        head_size: 64,
        page_size: 64,
        element_type: ElementType::F32,
        // Two for each of four users.
        size: KvSize::Pages(8),
        device_id: Some(0),
        ahead_percent: 0,
        ..KvOptions::default()
    };
    let host = HostStore::new(64 * MEBIBYTE as u64, None, None).unwrap();
    let cache = &KvCache::open(&options, Some(Arc::new(host))).unwrap();
    let _taken = take_all_but(0);
    let add = |user, start, tokens| {
        let lease = cache
            .prepare(&[KvRequest {
                owner: Owner(user),
                start,
                tokens,
                candidates: 0,
                items: &[],
                ..KvRequest::default()
            }])
            .unwrap();
        let _ = lease.commit().unwrap();
    };
    (0..8).for_each(|user| add(user, 0, 100));
    // Concurrently, with too little memory for all of them.
    std::thread::scope(|scope| {
        for user in 4..8 {
            scope.spawn(move || cache.offload(Owners::These(Owner::slice(&[user]))).unwrap());
        }
    });
    (0..8).for_each(|user| add(user, 100, 1));
    let stats = cache.stats();
    assert_eq!((stats.failed_offloads, stats.failed_onloads), (0, 0), "{stats:?}");
    assert_eq!(stats.tokens_from_store, 800, "{stats:?}");
}

#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn a_batch_that_does_not_fit_fails_alone() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let case = |candidates| {
        Case::<f32>::new(&mut Random(1), &[User { cached: 40, new: 10, candidates, contextual: 0 }], 2, 64, 32)
    };
    let small = case(5);
    let model = Model::open_memory(&graph(&small), &operators::options(Provider::Cuda)).unwrap();
    let (inputs, expected) = (Inputs::new(&small), reference::hstu_attention(&small.attention()).unwrap());
    let check = || {
        let (output, _) = inputs.run::<f32>(&model).unwrap();
        assert!(error(&output, &expected) <= tolerance::<f32>());
    };
    check();
    let taken = take_all_but(16 * MEBIBYTE);
    let left = Gpu::shared(0).unwrap().free_bytes().unwrap();
    // The queries alone are 30, 120 and 480 MB: ONNX Runtime may have some memory in reserve.
    let mut sizes = [60_000, 240_000, 960_000].map(|candidates| Inputs::new(&case(candidates))).into_iter();
    let large = sizes.find(|large| large.run::<f32>(&model).is_err());
    let large = large.unwrap_or_else(|| panic!("all of them fit into {left} bytes"));
    for _ in 0..2 {
        let error = large.run::<f32>(&model).expect_err("there is no room for it");
        assert!([Status::Runtime, Status::Capacity].contains(&error.status()), "{error}");
        assert!(error.message().contains("memory"), "{error}");
        check();
    }
    drop(taken);
    check();
}
