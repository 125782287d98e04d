//! A row's bits depend on its own inputs and nothing else: not on the batch, the pages' order or the threads.

mod common;

use common::{Case, Random, User, bits, only};
use pagoda_kernels::cpu::Isa;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::parallel::Threads;
use pagoda_kernels::{bf16, f16};

fn users() -> Vec<User> {
    let user = |cached, new, candidates, contextual| User { cached, new, candidates, contextual };
    if cfg!(miri) {
        return vec![user(9, 3, 2, 0), user(0, 4, 2, 1), user(3, 0, 1, 0)];
    }
    vec![user(130, 17, 9, 0), user(0, 70, 33, 5), user(0, 0, 0, 0), user(47, 0, 150, 0), user(49, 1, 0, 0)]
}

fn batch<T: OperatorElement>() -> Case<T> {
    let mut case = Case::new(&mut Random(11), &users(), 2, 36, 16);
    case.target_group_size = 3;
    case.max_attn_len = 90;
    case
}

fn for_each_kind(check: impl Fn(Isa, &dyn Fn(&[usize]) -> Vec<Vec<u32>>)) {
    fn kind<T: OperatorElement>(isa: Isa, check: &impl Fn(Isa, &dyn Fn(&[usize]) -> Vec<Vec<u32>>)) {
        let case = batch::<T>();
        check(isa, &|users| {
            let part = only(&case, users);
            let output = part.output(isa);
            (0..users.len()).map(|user| bits(part.rows_of(user, &output))).collect()
        });
    }
    for isa in Isa::available() {
        kind::<f32>(isa, &check);
        kind::<f16>(isa, &check);
        kind::<bf16>(isa, &check);
    }
}

#[test]
fn a_user_alone_or_in_a_batch() {
    for_each_kind(|isa, outputs| {
        let users: Vec<usize> = (0..users().len()).collect();
        let together = outputs(&users);
        for user in users {
            assert!(outputs(&[user])[0] == together[user], "{isa:?} user {user}");
        }
    });
}

#[test]
fn users_in_another_order() {
    for_each_kind(|isa, outputs| {
        let mut order: Vec<usize> = (0..users().len()).collect();
        let together = outputs(&order);
        for seed in 0..3 {
            Random(seed).shuffle(&mut order);
            for (user, output) in order.iter().zip(outputs(&order)) {
                assert!(output == together[*user], "{isa:?} order {order:?} user {user}");
            }
        }
    });
}

#[test]
fn pages_in_another_order() {
    let case = batch::<f32>();
    let mut places: Vec<usize> = (0..case.pool_pages).collect();
    Random(21).shuffle(&mut places);
    let mut moved = case.clone();
    let page = case.pool.len() / case.pool_pages;
    for (from, &to) in places.iter().enumerate() {
        moved.pool[to * page..(to + 1) * page].copy_from_slice(&case.pool[from * page..(from + 1) * page]);
    }
    moved.page_ids.iter_mut().for_each(|id| *id = places[*id as usize] as i32);
    assert_ne!(case.page_ids, moved.page_ids);
    for isa in Isa::available() {
        assert!(bits(&case.output(isa)) == bits(&moved.output(isa)), "{isa:?}");
    }
}

#[test]
fn any_number_of_threads() {
    let case = batch::<f32>();
    for isa in Isa::available() {
        let serial = bits(&case.output(isa));
        for threads in [1, 2, 5] {
            let output = case.output_on(isa, &Threads::new(threads)).unwrap();
            assert!(bits(&output) == serial, "{isa:?} on {threads} threads");
        }
    }
}

#[test]
fn fewer_candidates_leave_the_other_rows_alone() {
    // The rows fall into other lanes, groups and blocks when the candidates at the end go.
    let user = User { cached: 61, new: 5, candidates: if cfg!(miri) { 12 } else { 140 }, contextual: 0 };
    let case = Case::<f32>::new(&mut Random(12), &[user], 1, 20, 8);
    for isa in Isa::available() {
        let all = case.output(isa);
        for left in [0, 1, 2, 11, 40, 100].into_iter().filter(|left| *left < user.candidates) {
            let mut fewer = case.clone();
            let elements = (user.new + left) * 20;
            for tensor in [&mut fewer.query, &mut fewer.key, &mut fewer.value] {
                tensor.truncate(elements);
            }
            fewer.row_offsets[1] = (user.new + left) as i32;
            fewer.num_candidates[0] = left as i32;
            assert!(bits(&fewer.output(isa)) == bits(&all[..elements]), "{isa:?} {left} left");
        }
    }
}
