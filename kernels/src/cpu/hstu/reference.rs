//! The oracle of the HSTU operators: scalar, pair by pair, float64.

use crate::common::input_error::check_output;
use crate::{
    Activation, Element, GateNorm, HstuAttention, HstuEmbed, HstuGate, HstuLinear, HstuNorm, HstuOutput, HstuProject,
    HstuUnit, InputError, KvView, PagedKvAppend, Pages, QuantisedPool, Rows, Taken,
};

/// `HstuAttention` as the specification words it.
pub fn hstu_attention<T: Element>(op: &HstuAttention<'_, T>) -> Result<Vec<f64>, InputError> {
    op.check()?;
    let Rows { total_rows, heads, head_size, .. } = op.rows;
    let alpha = if op.alpha == 0.0 { 1.0 / (head_size as f64).sqrt() } else { f64::from(op.alpha) };
    let mut output = vec![0.0; total_rows * heads * head_size];
    for user in 0..op.rows.users() {
        let rows = op.rows.of(user);
        let cached = op.cached(user);
        for (i, head) in op.computed(user).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            let at = ((rows.start + i) * heads + head) * head_size;
            let query = &op.query[at..at + head_size];
            let out = &mut output[at..at + head_size];
            for c in 0..cached + rows.len() {
                if !visible(op, user, cached + i, c) {
                    continue;
                }
                let [key, value] = key_value(op, user, head, c);
                let x = alpha * query.iter().zip(key).map(|(q, k)| wide(*q) * k).sum::<f64>();
                let weight = x / (1.0 + (-x).exp());
                for (out, v) in out.iter_mut().zip(value) {
                    *out += weight * v;
                }
            }
            for out in out {
                *out /= op.scaling_seqlen as f64;
            }
        }
    }
    Ok(output)
}

/// M of the specification: whether the row at position `r` sees the key at position `c`.
fn visible<T: Element>(op: &HstuAttention<'_, T>, user: usize, r: usize, c: usize) -> bool {
    let h = op.cached(user) + op.rows.new_history(user);
    let contextual = op.contextual(user);
    if r < contextual {
        return c < h;
    }
    if c > r {
        return false;
    }
    if c >= h {
        let group = |x: usize| (x - h) as i64 / op.target_group_size;
        return group(c) == group(r);
    }
    let pos = |x: usize| match contextual {
        0 => x.min(h) as i64,
        _ => (x.min(h) as i64 - contextual as i64 + 1).max(0),
    };
    op.max_attn_len == 0 || pos(r) - pos(c) <= op.max_attn_len
}

fn key_value<T: Element>(op: &HstuAttention<'_, T>, user: usize, head: usize, c: usize) -> [Vec<f64>; 2] {
    let Rows { heads, head_size, .. } = op.rows;
    let of = |tensor: &[T], at: usize| tensor[at..at + head_size].iter().map(|number| wide(*number)).collect();
    let block = |pages, which| slot(pages, &op.rows, user, c, which) / head_size + head;
    match op.cache {
        Some((pages, KvView::Native(pool))) if c < op.cached(user) => {
            [0, 1].map(|which| of(pool, block(&pages, which) * head_size))
        }
        // As they are stored, those of this call too.
        Some((pages, KvView::Quantised { format, codes, scales }))
            if c < op.cached(user) + op.rows.new_history(user) =>
        {
            let (width, scale) = (format.pool_width(head_size), format.scales_width());
            [0, 1].map(|which| {
                let block = block(&pages, which);
                let (codes, scales) = (&codes[block * width..][..width], &scales[block * scale..][..scale]);
                (0..head_size).map(|index| f64::from(format.dequantise(codes, scales, index))).collect()
            })
        }
        _ => {
            let at = ((op.rows.of(user).start + c - op.cached(user)) * heads + head) * head_size;
            [of(op.key, at), of(op.value, at)]
        }
    }
}

/// `PagedKvAppend` token by token, in place on `pool`.
pub fn paged_kv_append<T: Element>(op: &PagedKvAppend<'_, T>, pool: &mut [T]) -> Result<(), InputError> {
    op.check()?;
    let width = op.rows.width();
    check_output("kv_pool", pool.len(), op.pages.pool_pages * 2 * op.pages.page_size * width)?;
    for user in 0..op.rows.users() {
        for i in 0..op.rows.new_history(user) {
            let row = (op.rows.of(user).start + i) * width;
            let position = op.pages.cached_len[user] as usize + i;
            for (which, from) in [op.key, op.value].into_iter().enumerate() {
                let to = slot(&op.pages, &op.rows, user, position, which);
                pool[to..to + width].copy_from_slice(&from[row..row + width]);
            }
        }
    }
    Ok(())
}

/// The same into a quantised pool.
pub fn paged_kv_append_quantised<T: Element>(
    op: &PagedKvAppend<'_, T>,
    pool: &mut QuantisedPool<'_>,
) -> Result<(), InputError> {
    op.check()?;
    op.check_quantised(pool)?;
    let Rows { heads, head_size, .. } = op.rows;
    let (width, scale) = (pool.format.pool_width(head_size), pool.format.scales_width());
    for user in 0..op.rows.users() {
        for (i, head) in (0..op.rows.new_history(user)).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            let from = ((op.rows.of(user).start + i) * heads + head) * head_size;
            let position = op.pages.cached_len[user] as usize + i;
            for (which, tensor) in [op.key, op.value].into_iter().enumerate() {
                let block = slot(&op.pages, &op.rows, user, position, which) / head_size + head;
                let numbers: Vec<f32> = tensor[from..from + head_size].iter().map(|number| number.to_f32()).collect();
                let codes = &mut pool.codes[block * width..][..width];
                pool.format.quantise(&numbers, codes, &mut pool.scales[block * scale..][..scale]);
            }
        }
    }
    Ok(())
}

/// Where the pool holds a token's key (`which` 0) or value (1), all heads of it.
fn slot(pages: &Pages<'_>, rows: &Rows<'_>, user: usize, position: usize, which: usize) -> usize {
    let page = pages.of(user)[position / pages.page_size] as usize;
    ((page * 2 + which) * pages.page_size + position % pages.page_size) * rows.heads * rows.head_size
}

/// `HstuNorm`.
pub fn hstu_norm<T: Element>(op: &HstuNorm<'_, T>) -> Result<Vec<f64>, InputError> {
    op.check(op.rows * op.width)?;
    let mut output = Vec::new();
    for row in rows(op.x, op.rows) {
        let normed = normed(row, op.epsilon);
        output.extend(
            normed.iter().zip(op.weight).zip(op.bias).map(|((x, weight), bias)| x * wide(*weight) + wide(*bias)),
        );
    }
    Ok(output)
}

/// `HstuProject`: u, v, q and k.
pub fn hstu_project<T: Element>(op: &HstuProject<'_, T>) -> Result<[Vec<f64>; 4], InputError> {
    op.check([op.rows * op.part(); 4])?;
    let mut outputs: [Vec<f64>; 4] = Default::default();
    for row in rows(op.x, op.rows) {
        for (column, sum) in product(row, op.weight, 4 * op.part()).into_iter().enumerate() {
            let sum = sum + op.bias.map_or(0.0, |bias| wide(bias[column]));
            let which = column / op.part();
            let silu = which < op.silu.outputs();
            outputs[which].push(if silu { sum / (1.0 + (-sum).exp()) } else { sum });
        }
    }
    Ok(outputs)
}

/// `HstuGate`.
pub fn hstu_gate<T: Element>(op: &HstuGate<'_, T>) -> Result<Vec<f64>, InputError> {
    op.check(op.rows * op.width() * if op.concat { 3 } else { 1 })?;
    let group = op.norm == GateNorm::Group;
    let mut output = Vec::new();
    for row in 0..op.rows {
        let from = Taken::source(op.taken, row) * op.width();
        let [attended, u] = [op.attended, op.u].map(|tensor| &tensor[from..from + op.width()]);
        if op.concat {
            output.extend(u.iter().chain(attended).map(|value| wide(*value)));
        }
        let together = if group { op.head_size } else { op.width() };
        let normed = attended.chunks(together.max(1)).flat_map(|part| normed(part, op.epsilon));
        output.extend(normed.zip(u).enumerate().map(|(at, (x, u))| {
            let learned = if group { at / op.head_size } else { at };
            (x * wide(op.weight[learned]) + wide(op.bias[learned])) * wide(*u)
        }));
    }
    Ok(output)
}

/// `HstuOutput`.
pub fn hstu_output<T: Element>(op: &HstuOutput<'_, T>) -> Result<Vec<f64>, InputError> {
    op.check(op.rows * op.width)?;
    let mut output = Vec::new();
    for (number, row) in rows(op.y, op.rows).enumerate() {
        let from = Taken::source(op.taken, number) * op.width;
        for (column, sum) in product(row, op.weight, op.width).into_iter().enumerate() {
            let bias = op.bias.map_or(0.0, |bias| wide(bias[column]));
            let residual = op.residual.map_or(0.0, |residual| wide(residual[from + column]));
            output.push(sum + bias + residual);
        }
    }
    Ok(output)
}

/// `HstuUnit`.
pub fn hstu_unit<T: Element>(op: &HstuUnit<'_, T>) -> Result<Vec<f64>, InputError> {
    op.check(op.rows * op.width)?;
    let mut output = Vec::new();
    for row in rows(op.x, op.rows) {
        let length = row.iter().map(|x| wide(*x).powi(2)).sum::<f64>().sqrt().max(f64::from(op.epsilon));
        output.extend(row.iter().map(|x| wide(*x) / length));
    }
    Ok(output)
}

/// `HstuLinear`.
pub fn hstu_linear(op: &HstuLinear<'_>) -> Result<Vec<f64>, InputError> {
    op.check(op.rows * op.width)?;
    let mut output = Vec::new();
    for row in rows(op.x, op.rows) {
        for (column, sum) in product(row, op.weight, op.width).into_iter().enumerate() {
            let sum = sum + op.bias.map_or(0.0, |bias| wide(bias[column]));
            output.push(match op.activation {
                Activation::None => sum,
                Activation::Relu => sum.max(0.0),
                Activation::Silu => sum / (1.0 + (-sum).exp()),
                Activation::Sigmoid => 1.0 / (1.0 + (-sum).exp()),
                Activation::Tanh => sum.tanh(),
            });
        }
    }
    Ok(output)
}

/// `HstuEmbed`.
pub fn hstu_embed(op: &HstuEmbed<'_>) -> Result<Vec<f64>, InputError> {
    op.check(op.rows * op.width)?;
    let number = |row: usize, column: usize| {
        let sum: f64 = op.tables.iter().map(|lookup| f64::from(lookup.of_key(row, op.width)[column])).sum();
        let learned = op.learned.iter().map(|lookup| f64::from(lookup.of_bucket(row, op.width)[column]));
        sum * f64::from(op.scale) + learned.sum::<f64>()
    };
    Ok((0..op.rows).flat_map(|row| (0..op.width).map(move |column| (row, column))).map(|(r, c)| number(r, c)).collect())
}

/// So many rows, which may have no columns.
fn rows<T>(tensor: &[T], count: usize) -> impl Iterator<Item = &[T]> {
    let width = tensor.len().checked_div(count).unwrap_or(0);
    (0..count).map(move |row| &tensor[row * width..(row + 1) * width])
}

/// A row times each of the rows of a weight.
fn product<T: Element>(row: &[T], weight: &[T], columns: usize) -> Vec<f64> {
    rows(weight, columns).map(|weight| row.iter().zip(weight).map(|(x, w)| wide(*x) * wide(*w)).sum()).collect()
}

/// The row less its mean, over its standard deviation.
fn normed<T: Element>(row: &[T], epsilon: f32) -> Vec<f64> {
    let count = row.len() as f64;
    let mean = row.iter().map(|x| wide(*x)).sum::<f64>() / count;
    let variance = row.iter().map(|x| (wide(*x) - mean).powi(2)).sum::<f64>() / count;
    row.iter().map(|x| (wide(*x) - mean) / (variance + f64::from(epsilon)).sqrt()).collect()
}

fn wide<T: Element>(value: T) -> f64 {
    f64::from(value.to_f32())
}
