//! A row's bits depend on its user's own inputs and nothing else.

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::{bf16, f16};

use crate::Context;
use crate::common::{Case, Random, User, bits, only};
use crate::device::OnDevice;

/// Users of every kind: long and short, with and without history, and one that brings NaN.
fn batch<T: OperatorElement>(head_size: usize) -> Case<T> {
    let user = |cached, new, candidates| User { cached, new, candidates, contextual: 0 };
    let users = [
        user(130, 17, 9),
        user(0, 170, 33),
        user(0, 0, 0),
        user(3000, 0, 150),
        user(49, 1, 0),
        user(1900, 70, 140),
        user(700, 300, 5),
    ];
    let mut case = Case::new(&mut Random(11), &users, 2, head_size, 24);
    case.target_group_size = 3;
    let width = 2 * head_size;
    let poisoned = case.row_offsets[4] as usize * width;
    case.value[poisoned..poisoned + width].fill(T::from_f32(f32::NAN));
    case
}

/// The bits of the outputs of some of a batch's users.
type Outputs<'a> = dyn Fn(&[usize]) -> Vec<Vec<u32>> + 'a;

/// Is given a name for messages, the outputs, and how many users there are.
type Check<'a> = dyn Fn(&str, &Outputs, usize) + 'a;

fn for_each_kind(check: &Check, context: &Context) {
    fn kind<T: OperatorElement>(context: &Context, head_size: usize, check: &Check) {
        let stream = context.gpu.context().new_stream().unwrap();
        let case = batch::<T>(head_size);
        for path in OnDevice::new(&case, &stream).paths(context.gpu) {
            let outputs = |users: &[usize]| {
                let part = only(&case, users);
                let output = OnDevice::new(&part, &stream).output(context.gpu, path);
                (0..users.len()).map(|user| bits(part.rows_of(user, &output))).collect()
            };
            check(&format!("{} D={head_size} {path:?}", T::NAME), &outputs, case.users.len());
        }
    }
    kind::<f32>(context, 40, check);
    for head_size in [32, 64, 128, 256] {
        kind::<f16>(context, head_size, check);
        kind::<bf16>(context, head_size, check);
    }
}

pub fn alone_or_together(context: &Context) {
    let check = |what: &str, outputs: &Outputs, users: usize| {
        let mut order: Vec<usize> = (0..users).collect();
        let together = outputs(&order);
        for (user, output) in together.iter().enumerate() {
            assert!(outputs(&[user])[0] == *output, "{what} user {user} alone");
        }
        for seed in 0..3 {
            Random(seed).shuffle(&mut order);
            for (user, output) in order.iter().zip(outputs(&order)) {
                assert!(output == together[*user], "{what} order {order:?} user {user}");
            }
        }
        for (user, output) in together.iter().enumerate() {
            let nan = output.iter().any(|bits| f32::from_bits(*bits).is_nan());
            assert!(nan == (user == 4), "{what}: user 4 alone brought NaN, not {user}");
        }
    };
    for_each_kind(&check, context);
}

pub fn pages_moved(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    for head_size in [32, 64, 128, 256] {
        let case = batch::<bf16>(head_size);
        let mut places: Vec<usize> = (0..case.pool_pages).collect();
        Random(21).shuffle(&mut places);
        let mut moved = case.clone();
        let page = case.pool.len() / case.pool_pages;
        for (from, &to) in places.iter().enumerate() {
            moved.pool[to * page..(to + 1) * page].copy_from_slice(&case.pool[from * page..(from + 1) * page]);
        }
        moved.page_ids.iter_mut().for_each(|id| *id = places[*id as usize] as i32);
        assert_ne!(case.page_ids, moved.page_ids);
        let (case, moved) = (OnDevice::new(&case, &stream), OnDevice::new(&moved, &stream));
        for path in case.paths(context.gpu) {
            let same = bits(&case.output(context.gpu, path)) == bits(&moved.output(context.gpu, path));
            assert!(same, "D={head_size} {path:?}");
        }
    }
}

/// The same call again and again, beside others on other streams.
pub fn twice(context: &Context) {
    let check = |what: &str, outputs: &Outputs, users: usize| {
        let all: Vec<usize> = (0..users).collect();
        let first = outputs(&all);
        for round in 0..5 {
            assert!(outputs(&all) == first, "{what} round {round}");
        }
    };
    for_each_kind(&check, context);
}

/// As many blocks of rows as make the Hopper kernel, where it has memory to work in, give one block several segments of the keys
/// behind one another: all but the last one, or all (`OnDevice::output` compares it with the kernel that has none). Some users see
/// little of their keys, some bring less than a warpgroup's rows, some several blocks. On several streams at once, so that not all
/// blocks of a launch run at the same time: none may wait for one that never begins.
pub fn runs(context: &Context) {
    use cudarc::driver::sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS;
    const HEADS: usize = 4;
    const STREAMS: u64 = 3;
    let multiprocessors = context.gpu.context().attribute(MULTIPROCESSORS).unwrap() as usize;
    for head_size in [32, 64, 128, 256] {
        for (eighths, window, several) in [
            (6, 0, false),
            (7, 0, false),
            (6, 300, false),
            (11, 0, false),
            (13, 90, false),
            (6, 300, true),
            (6, 700, true),
        ] {
            let case = many_blocks(head_size, multiprocessors * eighths / 8 / HEADS, HEADS, window, several);
            std::thread::scope(|scope| {
                for thread in 0..STREAMS {
                    let case = &case;
                    scope.spawn(move || {
                        let stream = context.gpu.context().new_stream().unwrap();
                        let case = OnDevice::new(case, &stream);
                        for path in case.paths(context.gpu) {
                            let first = bits(&case.output(context.gpu, path));
                            for round in 0..4 {
                                let again = bits(&case.output(context.gpu, path));
                                assert!(again == first, "D={head_size} window {window} {path:?} {thread} {round}");
                            }
                        }
                    });
                }
            });
        }
    }
}

/// Users with a block of rows each, or a little more, or a quarter as many with several, whose histories are more or less of the
/// same pages.
fn many_blocks(head_size: usize, users: usize, heads: usize, window: i64, several: bool) -> Case<bf16> {
    let (users, new, least, most) =
        if several { (users / 4, 640..760, 2300, 2600) } else { (users, 0..60, 1100, 1800) };
    let mut random = Random(head_size as u64 ^ 0x40);
    let pages = Case::<bf16>::new(&mut random, &[User { cached: most, ..User::default() }], heads, head_size, 32);
    let users: Vec<User> = (0..users)
        .map(|_| {
            let candidates = if several { 0 } else { 1 + random.below(80) };
            User { new: new.start + random.below(new.len()), candidates, ..User::default() }
        })
        .collect();
    let mut case = Case::new(&mut random, &users, heads, head_size, 32);
    let count = pages.page_ids.len();
    case.cached_len = users.iter().map(|_| (least + random.below(most - least)) as i32).collect();
    case.page_indptr = (0..=users.len()).map(|user| (user * count) as i32).collect();
    case.page_ids = pages.page_ids.repeat(users.len());
    (case.pool, case.pool_pages, case.max_attn_len) = (pages.pool, pages.pool_pages, window);
    case
}
