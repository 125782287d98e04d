//! Random calls of `PagedAttention`, and the calls that a call can be cut into.

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::{KvFormat, Pairs, f16};
use pagoda_test_support::Random;

use super::{Case, Pool};

/// A call with random sequences, shapes and options.
pub fn random_case<T: OperatorElement>(random: &mut Random) -> Case<T> {
    let (kv_heads, group) = (random.pick(&[1, 2, 3]), random.pick(&[1, 2, 3, 4, 7, 20]));
    let head_size = random.pick(&[4, 16, 20, 32, 48, 64, 72, 80, 128]);
    let page_size = random.pick(&[8, 16, 32]);
    let sequences = 1 + random.below(4);
    // Some with no new token, some with one, some with many; some across segments.
    let lengths = |random: &mut Random| {
        (random.pick(&[0, 1, 1, 2, 5, 17, 70]), random.pick(&[0, 1, 7, 63, 64, 100, 1020, 1024, 2100]))
    };
    let formats = [KvFormat::Native, KvFormat::Native, KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8];
    case_of(random, [kv_heads, group, head_size, page_size, sequences], lengths, &formats)
}

/// A call of a shape that tensor cores take, with lengths around the borders of their tiles, and some long ones.
pub fn random_tiles<T: OperatorElement>(random: &mut Random) -> Case<T> {
    let (kv_heads, group) = (random.pick(&[1, 2, 3, 8]), random.pick(&[1, 2, 3, 4, 5, 7, 8, 16, 17, 33]));
    let head_size = random.pick(&[64, 64, 96, 128, 128, 256]);
    let page_size = random.pick(&[8, 16, 24, 32, 64, 256]);
    // Many are found otherwise than few.
    let many = random.below(30) == 0;
    let sequences = if many { 65 + random.below(150) } else { 1 + random.below(6) };
    let mut long = false;
    let lengths = |random: &mut Random| {
        if many {
            return (random.pick(&[0, 1, 1, 2]), random.below(40));
        }
        let cached = match random.below(12) {
            0 if kv_heads < 3 && !std::mem::replace(&mut long, true) => random.pick(&[8_191, 16_384, 33_000]),
            0..6 => random.pick(&[0, 1, 15, 16, 63, 64, 127, 255, 256, 257, 511, 512]),
            _ => random.below(1500),
        };
        (random.pick(&[0, 1, 1, 1, 1, 2, 3, 4, 16, 17, 63, 64, 65, 130, 300]), cached)
    };
    let formats = [KvFormat::Native, KvFormat::Native, KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8];
    // There are kernels for int4 and fp8 with heads of 64 and 128.
    let formats = if matches!(head_size, 64 | 128) { &formats[..] } else { &formats[..3] };
    case_of(random, [kv_heads, group, head_size, page_size, sequences], lengths, formats)
}

/// `lengths` gives the new and the cached tokens of a sequence.
fn case_of<T: OperatorElement>(
    random: &mut Random,
    [kv_heads, group, head_size, page_size, sequences]: [usize; 5],
    mut lengths: impl FnMut(&mut Random) -> (i32, usize),
    formats: &[KvFormat],
) -> Case<T> {
    // Whole heads, parts of them, and such as have no multiple of eight pairs.
    let half_width = random.pick(&[head_size / 2, head_size / 4, 1 + head_size / 5]);
    let (mut row_offsets, mut cached_len, mut page_indptr, mut page_ids) = (vec![0], vec![], vec![0], vec![]);
    let mut pages = 0;
    for _ in 0..sequences {
        let (new, cached) = lengths(random);
        row_offsets.push(row_offsets.last().unwrap() + new);
        cached_len.push(cached as i32);
        let needed = (cached + new as usize).div_ceil(page_size);
        page_ids.extend((0..needed as i32).map(|page| pages + page));
        pages += needed as i32;
        page_indptr.push(page_ids.len() as i32);
    }
    random.shuffle(&mut page_ids);
    let rows = *row_offsets.last().unwrap() as usize;
    let mut numbers =
        |count: usize| -> Vec<f32> { (0..count).map(|_| (random.below(2001) as f32 - 1000.0) / 500.0).collect() };
    let elements = |numbers: Vec<f32>| -> Vec<T> { numbers.into_iter().map(T::from_f32).collect() };
    let (query, key) = (numbers(rows * kv_heads * group * head_size), numbers(rows * kv_heads * head_size));
    let value = elements(numbers(rows * kv_heads * head_size));
    let (sinks, slopes) = (elements(numbers(kv_heads * group)), numbers(kv_heads * group));
    let blocks = pages as usize * 2 * page_size * kv_heads;
    let stored = numbers(blocks * head_size);
    let positions: Vec<i32> = (0..rows).map(|row| (row % 50) as i32).collect();
    let angles = numbers(50 * half_width);
    let format = random.pick(formats);
    let pool = match format {
        KvFormat::Native => Pool::Native(elements(stored)),
        _ => {
            let (width, scales_width) = (format.pool_width(head_size), format.scales_width());
            let (mut codes, mut scales) = (vec![0; blocks * width], vec![f16::ZERO; blocks * scales_width]);
            for (block, numbers) in stored.chunks_exact(head_size).enumerate() {
                let codes = &mut codes[block * width..][..width];
                format.quantise(numbers, codes, &mut scales[block * scales_width..][..scales_width]);
            }
            Pool::Quantised(codes, scales)
        }
    };
    let pairs = random.pick(&[Pairs::Half, Pairs::Interleaved]);
    let rotation = random.once_in(2).then(|| {
        let (cos, sin) = (angles.iter().map(|angle| angle.cos()), angles.iter().map(|angle| angle.sin()));
        (cos.collect(), sin.collect(), half_width, pairs)
    });
    Case {
        row_offsets,
        query_heads: kv_heads * group,
        kv_heads,
        head_size,
        query: elements(query),
        key: elements(key),
        value,
        cached_len,
        page_indptr,
        page_ids,
        pool_pages: pages as usize,
        page_size,
        format,
        pool,
        positions: Some(positions),
        rotation,
        sinks: random.once_in(3).then_some(sinks),
        slopes: random.once_in(4).then(|| slopes.iter().map(|slope| slope.abs() / 4.0).collect()),
        slots: None,
        scale: random.pick(&[0.0, 0.0, 0.3]),
        window: random.pick(&[0, 0, 1, 30, 1100]),
        softcap: random.pick(&[0.0, 0.0, 5.0]),
    }
}

pub fn longest<T: OperatorElement>(case: &Case<T>) -> usize {
    let rows = case.row_offsets.windows(2).map(|rows| rows[1] - rows[0]);
    rows.zip(&case.cached_len).map(|(rows, cached)| rows + cached).max().unwrap() as usize
}

/// The rows `from..to` of each sequence, with those before them in the cache.
pub fn chunk<T: OperatorElement>(case: &Case<T>, from: usize, to: usize) -> Case<T> {
    let mut chunk = case.clone();
    let mut taken = Vec::new();
    chunk.row_offsets = vec![0];
    for (sequence, rows) in case.row_offsets.windows(2).enumerate() {
        let rows = rows[0] as usize..rows[1] as usize;
        let some = (rows.start + from).min(rows.end)..(rows.start + to).min(rows.end);
        chunk.cached_len[sequence] += (some.start - rows.start) as i32;
        taken.extend(some);
        chunk.row_offsets.push(taken.len() as i32);
    }
    let pick = |tensor: &[T], heads: usize| -> Vec<T> {
        let width = heads * case.head_size;
        taken.iter().flat_map(|row| tensor[row * width..(row + 1) * width].iter().copied()).collect()
    };
    chunk.query = pick(&case.query, case.query_heads);
    chunk.key = pick(&case.key, case.kv_heads);
    chunk.value = pick(&case.value, case.kv_heads);
    chunk.positions = case.positions.as_ref().map(|positions| taken.iter().map(|&row| positions[row]).collect());
    chunk
}

/// One sequence of a call by itself, the others being empty.
pub fn alone<T: OperatorElement>(case: &Case<T>, sequence: usize) -> Case<T> {
    let mut alone = case.clone();
    for other in (0..case.cached_len.len()).filter(|&other| other != sequence) {
        alone.cached_len[other] = 0;
    }
    let rows = case.row_offsets[sequence] as usize..case.row_offsets[sequence + 1] as usize;
    alone.row_offsets =
        (0..=case.cached_len.len()).map(|at| if at > sequence { rows.len() as i32 } else { 0 }).collect();
    let pick = |tensor: &[T], heads: usize| {
        tensor[rows.start * heads * case.head_size..rows.end * heads * case.head_size].to_vec()
    };
    alone.query = pick(&case.query, case.query_heads);
    (alone.key, alone.value) = (pick(&case.key, case.kv_heads), pick(&case.value, case.kv_heads));
    alone.positions = case.positions.as_ref().map(|positions| positions[rows.clone()].to_vec());
    if let Some((write_slots, ..)) = &mut alone.slots {
        *write_slots = write_slots[rows.start * case.kv_heads..rows.end * case.kv_heads].to_vec();
    }
    alone
}

/// The slots that a call without slots uses.
pub fn with_slots<T: OperatorElement>(mut case: Case<T>) -> Case<T> {
    let sequences = case.cached_len.len();
    let rows = |sequence: usize| case.row_offsets[sequence]..case.row_offsets[sequence + 1];
    let end = |sequence: usize| case.cached_len[sequence] + rows(sequence).end - rows(sequence).start;
    let len = (0..sequences).map(end).max().unwrap() as usize + 3;
    let (mut write_slots, mut token_pos, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in 0..sequences {
        for position in case.cached_len[sequence]..end(sequence) {
            positions.push(position);
            write_slots.extend(vec![position; case.kv_heads]);
        }
        for _ in 0..case.kv_heads {
            token_pos.extend((0..len as i32).map(|slot| if slot < end(sequence) { slot } else { -1 }));
        }
    }
    (case.slots, case.positions) = (Some((write_slots, token_pos, len)), Some(positions));
    case
}

/// A random call in which every head keeps its tokens in another order, and some slots have none.
pub fn random_slots<T: OperatorElement>(random: &mut Random) -> Case<T> {
    let case = random_case::<T>(random);
    scattered(case, random)
}

/// The same call with the tokens of each head in another order.
pub fn scattered<T: OperatorElement>(case: Case<T>, random: &mut Random) -> Case<T> {
    let mut case = with_slots(case);
    (case.rotation, case.window) = (None, random.pick(&[0, 40]));
    let sequences = case.cached_len.len();
    let (write_slots, token_pos, len) = case.slots.as_mut().unwrap();
    for (sequence, head) in (0..sequences).flat_map(|sequence| (0..case.kv_heads).map(move |head| (sequence, head))) {
        let tokens = &mut token_pos[(sequence * case.kv_heads + head) * *len..][..*len];
        let used = tokens.iter().filter(|&&position| position >= 0).count();
        let mut order: Vec<usize> = (0..used).collect();
        random.shuffle(&mut order);
        for (position, &slot) in order.iter().enumerate() {
            tokens[slot] = position as i32;
        }
        let rows = case.row_offsets[sequence] as usize..case.row_offsets[sequence + 1] as usize;
        for (index, row) in rows.enumerate() {
            write_slots[row * case.kv_heads + head] = order[case.cached_len[sequence] as usize + index] as i32;
        }
        for &slot in order.iter().take(case.cached_len[sequence] as usize).filter(|slot| **slot % 7 == 3) {
            tokens[slot] = -1;
        }
    }
    case
}
