//! Constants, and operators that pick, join and reshape: their numbers are those of their inputs in other places.

use super::super::value::{Value, broadcast, broadcast_index, each_place, strides};
use super::call::{COUNTS, Call, MIXES, Made, axis};

impl Call<'_> {
    pub(super) fn constant(&self) -> Option<Made> {
        let attribute = self.node.attribute.first()?;
        let value = match attribute.name.as_str() {
            "value" => Value::of_tensor(attribute.t.as_ref()?),
            "value_int" => Value::known(&[], vec![attribute.i? as f64], true),
            "value_float" => Value::known(&[], vec![attribute.f?.into()], false),
            "value_ints" => {
                let numbers: Vec<f64> = attribute.ints.iter().map(|&number| number as f64).collect();
                Value::known(&[numbers.len()], numbers, true)
            }
            "value_floats" => {
                let numbers: Vec<f64> = attribute.floats.iter().map(|&number| number.into()).collect();
                Value::known(&[numbers.len()], numbers, false)
            }
            _ => return None,
        };
        Some(Made::one(value))
    }

    pub(super) fn shape(&self) -> Option<Made> {
        let dims = self.dims(0)?;
        let rank = dims.len() as i64;
        let place = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
        let (start, end) = (place(self.node.int("start", 0)), place(self.node.int("end", rank)));
        let part: Vec<f64> = dims.get(start..end)?.iter().map(|&dim| dim as f64).collect();
        Some(Made::one(Value { of_count: true, ..Value::known(&[part.len()], part, true) }))
    }

    pub(super) fn size(&self) -> Option<Made> {
        let count: usize = self.dims(0)?.iter().product();
        Some(Made::one(Value { of_count: true, ..Value::known(&[], vec![count as f64], true) }))
    }

    pub(super) fn constant_of_shape(&self) -> Option<Made> {
        let dims = sizes(&self.ints(0)?)?;
        let tensor = self.node.attribute("value").and_then(|attribute| attribute.t.as_ref());
        let of = tensor.map_or_else(|| Value::known(&[1], vec![0.0], false), Value::of_tensor);
        Some(Made::one(of.picked(&dims, |_| 0)))
    }

    pub(super) fn range(&self) -> Option<Made> {
        let of_count = self.inputs.iter().flatten().any(|value| value.of_count);
        let numbers: Option<Vec<f64>> = self.inputs.iter().map(|value| value.and_then(Value::single)).collect();
        let &[start, end, step] = &numbers?[..] else { return None };
        let count = ((end - start) / step).ceil().max(0.0);
        if count.is_nan() || count >= 1e8 {
            return None;
        }
        let numbers: Vec<f64> = (0..count as usize).map(|at| start + step * at as f64).collect();
        let value = Value { of_count, ..Value::known(&[numbers.len()], numbers, self.input(0)?.whole) };
        Some(Made::one(value).issue_if(of_count, COUNTS))
    }

    pub(super) fn gather(&self) -> Option<Made> {
        let (data, indices) = (self.input(0)?, self.input(1)?);
        let (dims, of_indices) = (data.dims.as_deref()?, indices.dims.as_deref()?);
        let axis = self.axis(0, dims.len())?;
        let made_dims = [&dims[..axis], of_indices, &dims[axis + 1..]].concat();
        let tokens = match (data.tokens, indices.tokens) {
            (Some(at), None) if at < axis => Some(at),
            (Some(at), None) => Some(at + of_indices.len() - 1),
            (None, at) => at.map(|at| at + axis),
            (Some(_), Some(_)) => None,
        };
        let mixes = data.tokens.is_some() && (indices.tokens.is_some() || data.tokens == Some(axis));
        let mut value =
            Value { tokens, of_count: data.of_count || indices.of_count, ..Value::shaped(&made_dims, tokens) };
        if let (Some(_), Some(places)) = (&data.numbers, indices.numbers.as_ref()) {
            let (steps, size) = (strides(dims), dims[axis]);
            let mut outside = false;
            let picked = data.picked(&made_dims, |place| {
                let index = broadcast_index(&place[axis..axis + of_indices.len()], of_indices);
                let found = places[index];
                let found = if found < 0.0 { found + size as f64 } else { found };
                outside |= !(0.0..size as f64).contains(&found);
                let before: usize = place[..axis].iter().zip(&steps).map(|(at, step)| at * step).sum();
                let after = place[axis + of_indices.len()..].iter().zip(&steps[axis + 1..]).map(|(at, step)| at * step);
                let found = if outside { 0 } else { found as usize };
                before + found * steps[axis] + after.sum::<usize>()
            });
            if outside {
                return None;
            }
            value = Value { tokens, of_count: value.of_count, ..picked };
        }
        value.whole = data.whole;
        Some(Made::one(value).issue_if(mixes, MIXES))
    }

    pub(super) fn gather_blocks(&self) -> Option<Made> {
        let (data, indices, scales) = (self.input(0)?, self.input(1)?, self.dims(2)?);
        if self.node.int("gather_axis", 0) != 0 || data.tokens.is_some() {
            return None;
        }
        let width = scales.last()? * usize::try_from(self.node.int("block_size", 128)).ok()?;
        let dims = [indices.dims.as_deref()?, &[width]].concat();
        Some(Made::one(Value::shaped(&dims, indices.tokens)))
    }

    pub(super) fn unsqueeze(&self) -> Option<Made> {
        let (value, axes) = (self.input(0)?, self.axes(1)?);
        let dims = value.dims.as_deref()?;
        let rank = dims.len() + axes.len();
        let axes: Vec<usize> = axes.iter().map(|&at| axis(at, rank)).collect::<Option<_>>()?;
        let mut old = 0..dims.len();
        let from: Vec<Option<usize>> = (0..rank).map(|at| if axes.contains(&at) { None } else { old.next() }).collect();
        let made = from.iter().map(|from| from.map_or(1, |at| dims[at])).collect();
        let tokens = value.tokens.and_then(|at| from.iter().position(|&from| from == Some(at)));
        Some(Made::one(value.reshaped(made, tokens)))
    }

    pub(super) fn squeeze(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let axes = match self.axes(1) {
            Some(axes) => axes.iter().map(|&at| axis(at, dims.len())).collect::<Option<Vec<_>>>()?,
            None => (0..dims.len()).filter(|&at| dims[at] == 1).collect(),
        };
        if axes.iter().any(|&at| dims[at] != 1) {
            return None;
        }
        let kept: Vec<usize> = (0..dims.len()).filter(|at| !axes.contains(at)).collect();
        let tokens = value.tokens.and_then(|at| kept.iter().position(|&kept| kept == at));
        let lost = value.tokens.is_some() && tokens.is_none();
        let made = Made::one(value.reshaped(kept.iter().map(|&at| dims[at]).collect(), tokens));
        Some(made.issue_if(lost, MIXES))
    }

    pub(super) fn reshape(&self) -> Option<Made> {
        let (value, shape) = (self.input(0)?, self.ints(1)?);
        let dims = value.dims.as_deref()?;
        let zeros_copy = self.node.int("allowzero", 0) == 0;
        let mut made = Vec::new();
        for (at, &size) in shape.iter().enumerate() {
            made.push(match size {
                0 if zeros_copy => *dims.get(at)?,
                -1 => usize::MAX,
                size => size.try_into().ok()?,
            });
        }
        let count: usize = dims.iter().product();
        if let Some(open) = made.iter().position(|&size| size == usize::MAX) {
            made[open] = 1;
            made[open] = count.checked_div(made.iter().product()).unwrap_or(0);
        }
        if made.iter().product::<usize>() != count || made.contains(&usize::MAX) {
            return None;
        }
        Some(self.in_shape(value, dims, made))
    }

    pub(super) fn flatten(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let at = self.node.int("axis", 1);
        let at =
            usize::try_from(if at < 0 { at + dims.len() as i64 } else { at }).ok().filter(|&at| at <= dims.len())?;
        let made = vec![dims[..at].iter().product(), dims[at..].iter().product()];
        Some(self.in_shape(value, dims, made))
    }

    /// The tokens stay in one dimension if what comes before it is the same.
    pub(super) fn in_shape(&self, value: &Value, dims: &[usize], made: Vec<usize>) -> Made {
        let tokens = value.tokens.and_then(|at| {
            let before: usize = dims[..at].iter().product();
            (0..made.len()).find(|&to| made[to] == dims[at] && made[..to].iter().product::<usize>() == before)
        });
        let lost = value.tokens.is_some() && tokens.is_none();
        Made::one(value.reshaped(made, tokens)).issue_if(lost, MIXES)
    }

    pub(super) fn transpose(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let order: Vec<usize> = match self.node.ints("perm") {
            Some(order) => sizes(order)?,
            None => (0..dims.len()).rev().collect(),
        };
        if order.len() != dims.len() || order.iter().any(|&at| at >= dims.len()) {
            return None;
        }
        let (made, steps): (Vec<usize>, _) = (order.iter().map(|&at| dims[at]).collect(), strides(dims));
        let picked = value.picked(&made, |place| place.iter().zip(&order).map(|(at, &from)| at * steps[from]).sum());
        let tokens = value.tokens.and_then(|at| order.iter().position(|&from| from == at));
        Some(Made::one(Value { tokens, ..picked }))
    }

    pub(super) fn expand(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let made = broadcast(&[dims, &sizes(&self.ints(1)?)?])?;
        let tokens = value.tokens.map(|at| made.len() - dims.len() + at);
        let picked = value.picked(&made, |place| broadcast_index(place, dims));
        Some(Made::one(Value { tokens, ..picked }))
    }

    pub(super) fn tile(&self) -> Option<Made> {
        let (value, times) = (self.input(0)?, sizes(&self.ints(1)?)?);
        let dims = value.dims.as_deref()?;
        if times.len() != dims.len() {
            return None;
        }
        let (made, steps): (Vec<usize>, _) =
            (dims.iter().zip(&times).map(|(dim, by)| dim * by).collect(), strides(dims));
        let from = |place: &[usize]| place.iter().zip(dims).zip(&steps).map(|((at, dim), step)| at % dim * step).sum();
        let picked = value.picked(&made, from);
        let mixes = value.tokens.is_some_and(|at| times[at] != 1);
        Some(Made::one(Value { tokens: value.tokens, ..picked }).issue_if(mixes, MIXES))
    }

    pub(super) fn concat(&self) -> Option<Made> {
        let values: Vec<&Value> = self.inputs.iter().copied().collect::<Option<_>>()?;
        let all: Vec<&[usize]> = values.iter().map(|value| value.dims.as_deref()).collect::<Option<_>>()?;
        let mut made = all.first()?.to_vec();
        let axis = self.axis(0, made.len())?;
        if all.iter().any(|dims| dims.len() != made.len()) {
            return None;
        }
        made[axis] = all.iter().map(|dims| dims[axis]).sum();
        let tokens = values.iter().find_map(|value| value.tokens);
        let mixes = tokens == Some(axis) || values.iter().any(|value| value.tokens.is_some() && value.tokens != tokens);
        let mut numbers = values.iter().all(|value| value.numbers.is_some()).then(Vec::new);
        if let Some(numbers) = &mut numbers {
            each_place(&made, |place| {
                let (mut place, mut of) = (place.to_vec(), 0);
                while place[axis] >= all[of][axis] {
                    place[axis] -= all[of][axis];
                    of += 1;
                }
                numbers.extend(values[of].numbers.as_ref().map(|numbers| numbers[broadcast_index(&place, all[of])]));
            });
        }
        let value = Value {
            numbers: numbers.map(Into::into),
            whole: values.iter().all(|value| value.whole),
            of_count: values.iter().any(|value| value.of_count),
            ..Value::shaped(&made, tokens)
        };
        Some(Made::one(value).issue_if(mixes, MIXES))
    }

    pub(super) fn split(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let axis = self.axis(0, dims.len())?;
        let parts = self.node.output.len();
        let lengths = match self.ints(1).or_else(|| self.node.ints("split").map(<[i64]>::to_vec)) {
            Some(lengths) => sizes(&lengths)?,
            None => {
                let size = dims[axis].div_ceil(parts);
                (0..parts).map(|at| size.min(dims[axis].saturating_sub(at * size))).collect()
            }
        };
        if lengths.len() != parts || lengths.iter().sum::<usize>() != dims[axis] {
            return None;
        }
        let (mut start, mut values) = (0, Vec::new());
        for length in lengths {
            values.push(part(value, dims, axis, start, 1, length));
            start += length;
        }
        Some(Made { values, issue: None }.issue_if(value.tokens == Some(axis), MIXES))
    }

    pub(super) fn slice(&self) -> Option<Made> {
        let value = self.input(0)?;
        let list = |at: usize, name: &str| self.ints(at).or_else(|| self.node.ints(name).map(<[i64]>::to_vec));
        let (starts, ends) = (list(1, "starts")?, list(2, "ends")?);
        let axes = list(3, "axes").unwrap_or_else(|| (0..starts.len() as i64).collect());
        let steps = self.ints(4).unwrap_or_else(|| vec![1; starts.len()]);
        let (mut made, mut mixes) = (value.clone(), false);
        for (at, &start) in starts.iter().enumerate() {
            let dims = made.dims.clone()?;
            let axis = axis(*axes.get(at)?, dims.len())?;
            let (size, step) = (dims[axis] as i64, *steps.get(at)?);
            let place = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
            if step < 1 {
                return None;
            }
            let (begin, end) = (place(start).clamp(0, size), place(*ends.get(at)?).clamp(0, size));
            let length = ((end - begin).max(0) as usize).div_ceil(step as usize);
            if (length, step) == (dims[axis], 1) {
                continue;
            }
            mixes |= made.tokens == Some(axis);
            made = part(&made, &dims, axis, begin as usize, step as usize, length);
        }
        Some(Made::one(made).issue_if(mixes, MIXES))
    }
}

/// A part of one dimension.
fn part(value: &Value, dims: &[usize], axis: usize, begin: usize, step: usize, length: usize) -> Value {
    let (mut made, steps) = (dims.to_vec(), strides(dims));
    made[axis] = length;
    let from = |place: &[usize]| {
        let at = |(at, (&place, stride)): (usize, (&usize, &usize))| {
            stride * if at == axis { begin + step * place } else { place }
        };
        place.iter().zip(&steps).enumerate().map(at).sum()
    };
    Value { tokens: value.tokens, ..value.picked(&made, from) }
}

fn sizes(numbers: &[i64]) -> Option<Vec<usize>> {
    numbers.iter().map(|&number| number.try_into().ok()).collect()
}
