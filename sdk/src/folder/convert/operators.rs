//! What operators make of what is known of their inputs: shapes, where tokens are, and small numbers. An operator that works on each
//! token alone may stay in a graph of pages; others have an issue.

use super::proto::NodeProto;
use super::value::{Value, broadcast, broadcast_index, combined, each_place, is_float, strides};
use crate::tensor::ElementType;

/// The outputs of a node. `issue` says why it can not stay in a graph whose rows are tokens of several sequences.
pub(super) struct Made {
    pub(super) values: Vec<Value>,
    pub(super) issue: Option<String>,
}

const UNKNOWN: &str = "is not known to work on each token alone";
const MIXES: &str = "mixes the tokens of a call";
const COUNTS: &str = "counts the tokens of a call, which here are of several sequences";

impl Made {
    fn one(value: Value) -> Self {
        Self { values: vec![value], issue: None }
    }

    fn issue(mut self, issue: &str) -> Self {
        self.issue.get_or_insert_with(|| issue.to_owned());
        self
    }

    fn issue_if(self, condition: bool, issue: &str) -> Self {
        if condition { self.issue(issue) } else { self }
    }
}

/// The outputs of a node with these inputs, `None` for those that it does not have.
pub(super) fn run(node: &NodeProto, inputs: &[Option<&Value>]) -> Made {
    let call = Call { node, inputs };
    // What has an input of no known shape has none either, and is not at fault.
    let at_fault = inputs.iter().flatten().all(|value| value.dims.is_some());
    let made = if at_fault { call.run() } else { None };
    let unknown = || Made { values: Vec::new(), issue: at_fault.then(|| UNKNOWN.to_owned()) };
    let mut made = made.unwrap_or_else(unknown);
    made.values.resize(node.output.len(), Value::default());
    let of_past = inputs.iter().flatten().any(|value| value.of_past);
    for value in &mut made.values {
        value.of_past |= of_past;
    }
    made
}

struct Call<'a> {
    node: &'a NodeProto,
    inputs: &'a [Option<&'a Value>],
}

impl<'a> Call<'a> {
    fn input(&self, at: usize) -> Option<&'a Value> {
        self.inputs.get(at).copied().flatten()
    }

    fn dims(&self, at: usize) -> Option<&'a [usize]> {
        self.input(at)?.dims.as_deref()
    }

    fn ints(&self, at: usize) -> Option<Vec<i64>> {
        self.input(at)?.ints()
    }

    /// A list of axes, which newer operators have as an input and older ones as an attribute. `None`: not given.
    fn axes(&self, at: usize) -> Option<Vec<i64>> {
        self.ints(at).or_else(|| self.node.ints("axes").map(<[i64]>::to_vec))
    }

    fn axis(&self, absent: i64, rank: usize) -> Option<usize> {
        axis(self.node.int("axis", absent), rank)
    }

    fn run(&self) -> Option<Made> {
        match self.node.domain.as_str() {
            "" | "ai.onnx" => self.onnx(),
            "com.microsoft" => self.microsoft(),
            _ => None,
        }
    }

    fn onnx(&self) -> Option<Made> {
        match self.node.op_type.as_str() {
            "Constant" => self.constant(),
            "Shape" => self.shape(),
            "Size" => self.size(),
            "Gather" => self.gather(),
            "Unsqueeze" => self.unsqueeze(),
            "Squeeze" => self.squeeze(),
            "Reshape" => self.reshape(),
            "Flatten" => self.flatten(),
            "Transpose" => self.transpose(),
            "Expand" => self.expand(),
            "Tile" => self.tile(),
            "Concat" => self.concat(),
            "Split" => self.split(),
            "Slice" => self.slice(),
            "Range" => self.range(),
            "ConstantOfShape" => self.constant_of_shape(),
            "Trilu" => self.trilu(),
            "CumSum" => self.cum_sum(),
            "ReduceSum" => self.reduced(Some(|numbers| numbers.iter().sum())),
            "ReduceMax" => self.reduced(Some(|numbers| numbers.iter().copied().fold(f64::MIN, f64::max))),
            "ReduceMin" => self.reduced(Some(|numbers| numbers.iter().copied().fold(f64::MAX, f64::min))),
            "ReduceProd" => self.reduced(Some(|numbers| numbers.iter().product())),
            "ReduceMean" | "ReduceL1" | "ReduceL2" | "ReduceSumSquare" | "ReduceLogSumExp" => self.reduced(None),
            "Softmax" | "LogSoftmax" => self.along_axis(-1),
            "LayerNormalization" | "RMSNormalization" | "SimplifiedLayerNormalization" => self.norm(),
            "MatMul" | "MatMulInteger" => self.mat_mul(),
            "Gemm" => self.gemm(),
            "DynamicQuantizeLinear" => self.dynamic_quantize(),
            "QuantizeLinear" | "DequantizeLinear" => Some(Made::one(self.like(0)?)),
            "RotaryEmbedding" => Some(Made::one(self.like(0)?)),
            "Attention" => self.attention(),
            _ => self.by_number(),
        }
    }

    fn microsoft(&self) -> Option<Made> {
        match self.node.op_type.as_str() {
            "SkipSimplifiedLayerNormalization" | "SkipLayerNormalization" => {
                let like = self.like(0)?;
                let values = vec![like.clone(), Value::default(), Value::default(), like];
                Some(Made { values, issue: None }.issue_if(self.ends_with_tokens(0), MIXES))
            }
            "SimplifiedLayerNormalization" => self.norm(),
            "MatMulNBits" | "MatMulBnb4" => self.wide(self.node.int("N", 0)),
            "Gelu" | "QuickGelu" | "FastGelu" | "BiasGelu" | "QMoE" | "MoE" => Some(Made::one(self.like(0)?)),
            "RotaryEmbedding" => Some(Made::one(self.like(0)?)),
            "GatherBlockQuantized" => self.gather_blocks(),
            "GroupQueryAttention" => self.group_query(),
            _ => None,
        }
    }

    /// A tensor of the shape of an input, with other numbers.
    fn like(&self, at: usize) -> Option<Value> {
        let value = self.input(at)?;
        Some(Value { numbers: None, ..value.clone() })
    }

    fn ends_with_tokens(&self, at: usize) -> bool {
        self.input(at).is_some_and(|value| value.tokens.zip(value.rank()).is_some_and(|(at, rank)| at + 1 == rank))
    }

    // ---- constants and shapes ---------------------------------------------------------------------------------------

    fn constant(&self) -> Option<Made> {
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

    fn shape(&self) -> Option<Made> {
        let dims = self.dims(0)?;
        let rank = dims.len() as i64;
        let place = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
        let (start, end) = (place(self.node.int("start", 0)), place(self.node.int("end", rank)));
        let part: Vec<f64> = dims.get(start..end)?.iter().map(|&dim| dim as f64).collect();
        Some(Made::one(Value { of_count: true, ..Value::known(&[part.len()], part, true) }))
    }

    fn size(&self) -> Option<Made> {
        let count: usize = self.dims(0)?.iter().product();
        Some(Made::one(Value { of_count: true, ..Value::known(&[], vec![count as f64], true) }))
    }

    fn constant_of_shape(&self) -> Option<Made> {
        let dims = sizes(&self.ints(0)?)?;
        let tensor = self.node.attribute("value").and_then(|attribute| attribute.t.as_ref());
        let of = tensor.map_or_else(|| Value::known(&[1], vec![0.0], false), Value::of_tensor);
        Some(Made::one(of.picked(&dims, |_| 0)))
    }

    fn range(&self) -> Option<Made> {
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

    // ---- parts of tensors, and other shapes ---------------------------------------------------------------------------

    fn gather(&self) -> Option<Made> {
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

    fn gather_blocks(&self) -> Option<Made> {
        let (data, indices, scales) = (self.input(0)?, self.input(1)?, self.dims(2)?);
        if self.node.int("gather_axis", 0) != 0 || data.tokens.is_some() {
            return None;
        }
        let width = scales.last()? * usize::try_from(self.node.int("block_size", 128)).ok()?;
        let dims = [indices.dims.as_deref()?, &[width]].concat();
        Some(Made::one(Value::shaped(&dims, indices.tokens)))
    }

    fn unsqueeze(&self) -> Option<Made> {
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

    fn squeeze(&self) -> Option<Made> {
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

    fn reshape(&self) -> Option<Made> {
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

    fn flatten(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let at = self.node.int("axis", 1);
        let at =
            usize::try_from(if at < 0 { at + dims.len() as i64 } else { at }).ok().filter(|&at| at <= dims.len())?;
        let made = vec![dims[..at].iter().product(), dims[at..].iter().product()];
        Some(self.in_shape(value, dims, made))
    }

    /// The tokens stay in one dimension if what comes before it is the same.
    fn in_shape(&self, value: &Value, dims: &[usize], made: Vec<usize>) -> Made {
        let tokens = value.tokens.and_then(|at| {
            let before: usize = dims[..at].iter().product();
            (0..made.len()).find(|&to| made[to] == dims[at] && made[..to].iter().product::<usize>() == before)
        });
        let lost = value.tokens.is_some() && tokens.is_none();
        Made::one(value.reshaped(made, tokens)).issue_if(lost, MIXES)
    }

    fn transpose(&self) -> Option<Made> {
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

    fn expand(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let made = broadcast(&[dims, &sizes(&self.ints(1)?)?])?;
        let tokens = value.tokens.map(|at| made.len() - dims.len() + at);
        let picked = value.picked(&made, |place| broadcast_index(place, dims));
        Some(Made::one(Value { tokens, ..picked }))
    }

    fn tile(&self) -> Option<Made> {
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

    fn concat(&self) -> Option<Made> {
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

    fn split(&self) -> Option<Made> {
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

    fn slice(&self) -> Option<Made> {
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

    // ---- numbers -------------------------------------------------------------------------------------------------------

    /// An operator that combines numbers of the same place.
    fn by_number(&self) -> Option<Made> {
        let values: Vec<&Value> = self.inputs.iter().copied().flatten().collect();
        let all: Vec<&[usize]> = values.iter().map(|value| value.dims.as_deref()).collect::<Option<_>>()?;
        let to = || ElementType::from_number(self.node.int("to", 0) as i32);
        let whole = match self.node.op_type.as_str() {
            "Cast" => !to().is_some_and(is_float),
            "Where" => values.get(1)?.whole,
            "IsNaN" | "IsInf" => true,
            op if TRUTHS.contains(&op) => true,
            _ => values.iter().all(|value| value.whole),
        };
        let function = match self.node.op_type.as_str() {
            "Cast" if to() == Some(ElementType::Bool) => Some(Function::One(|x| f64::from(x != 0.0))),
            "Cast" if whole => Some(Function::One(f64::trunc)),
            "Cast" => Some(Function::One(|x| x)),
            "Div" if whole => Some(Function::Two(|x, y| (x / y).trunc())),
            op => FUNCTIONS.iter().find(|(name, _)| *name == op).map(|&(_, function)| function),
        };
        if function.is_none() && !OTHERS.contains(&self.node.op_type.as_str()) {
            return None;
        }
        let dims = broadcast(&all)?;
        let aligned = |value: &Value| Some(dims.len() - value.rank()? + value.tokens?);
        let mut places = values.iter().filter_map(|value| aligned(value));
        let tokens = places.next();
        let mixes = places.any(|place| Some(place) != tokens);
        let of_count = values.iter().any(|value| value.of_count);
        let numbers = function.and_then(|function| {
            combined(&values, &dims, |given| match function {
                Function::One(function) => function(given[0]),
                Function::Two(function) => given[1..].iter().fold(given[0], |x, &y| function(x, y)),
                Function::Where => given[if given[0] != 0.0 { 1 } else { 2 }],
            })
        });
        let value = Value { numbers, whole, of_count, ..Value::shaped(&dims, tokens) };
        Some(Made::one(value).issue_if(mixes, MIXES).issue_if(tokens.is_some() && of_count, COUNTS))
    }

    fn trilu(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let k = self.input(1).map_or(Some(0.0), Value::single)?;
        let upper = self.node.int("upper", 1) != 0;
        let rank = dims.len().checked_sub(2)?;
        let mut places = Vec::new();
        each_place(dims, |place| {
            let above = place[rank + 1] as f64 - place[rank] as f64 - k;
            places.push(if upper { above >= 0.0 } else { above <= 0.0 });
        });
        let kept = |numbers: &std::rc::Rc<[f64]>| {
            numbers.iter().zip(&places).map(|(&number, &kept)| if kept { number } else { 0.0 }).collect()
        };
        let numbers = value.numbers.as_ref().map(kept);
        Some(Made::one(Value { numbers, ..value.clone() }).issue(COUNTS))
    }

    fn cum_sum(&self) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let axis = axis(self.input(1)?.single()? as i64, dims.len())?;
        if self.node.int("exclusive", 0) != 0 || self.node.int("reverse", 0) != 0 {
            return None;
        }
        let step = strides(dims)[axis];
        let numbers = value.numbers.as_ref().map(|numbers| {
            let (mut sums, mut index) = (numbers.to_vec(), 0);
            each_place(dims, |place| {
                if place[axis] > 0 {
                    sums[index] += sums[index - step];
                }
                index += 1;
            });
            sums.into()
        });
        Some(Made::one(Value { numbers, ..value.clone() }).issue(COUNTS))
    }

    fn reduced(&self, function: Option<fn(&[f64]) -> f64>) -> Option<Made> {
        let value = self.input(0)?;
        let dims = value.dims.as_deref()?;
        let given = self.axes(1).unwrap_or_default();
        let axes: Vec<usize> = match given.is_empty() {
            true if self.node.int("noop_with_empty_axes", 0) != 0 => return Some(Made::one(value.clone())),
            true => (0..dims.len()).collect(),
            false => given.iter().map(|&at| axis(at, dims.len())).collect::<Option<_>>()?,
        };
        let keep = self.node.int("keepdims", 1) != 0;
        let kept: Vec<usize> = (0..dims.len()).filter(|at| keep || !axes.contains(at)).collect();
        let made: Vec<usize> = kept.iter().map(|at| if axes.contains(at) { 1 } else { dims[*at] }).collect();
        let mixes = value.tokens.is_some_and(|at| axes.contains(&at));
        let tokens = value.tokens.filter(|_| !mixes).and_then(|at| kept.iter().position(|&kept| kept == at));
        let numbers = value.numbers.as_ref().zip(function).map(|(numbers, function)| {
            let mut groups = vec![Vec::new(); made.iter().product()];
            let (steps, mut index) = (strides(&made), 0);
            each_place(dims, |place| {
                let of_group =
                    |(&from, step): (&usize, &usize)| if axes.contains(&from) { 0 } else { place[from] * step };
                groups[kept.iter().zip(&steps).map(of_group).sum::<usize>()].push(numbers[index]);
                index += 1;
            });
            groups.iter().map(|group| function(group)).collect()
        });
        let value = Value { numbers, whole: value.whole, of_count: value.of_count, ..Value::shaped(&made, tokens) };
        Some(Made::one(value).issue_if(mixes, MIXES))
    }

    fn along_axis(&self, absent: i64) -> Option<Made> {
        let value = self.like(0)?;
        let mixes = value.tokens == self.axis(absent, value.rank()?);
        Some(Made::one(value).issue_if(mixes, MIXES))
    }

    fn norm(&self) -> Option<Made> {
        let value = self.like(0)?;
        let first = self.axis(-1, value.rank()?)?;
        let mixes = value.tokens.is_some_and(|at| at >= first);
        Some(Made::one(value).issue_if(mixes, MIXES))
    }

    // ---- products ------------------------------------------------------------------------------------------------------

    fn mat_mul(&self) -> Option<Made> {
        let (left, right) = (self.input(0)?, self.input(1)?);
        let (a, b) = (left.dims.as_deref()?, right.dims.as_deref()?);
        if a.len() < 2 || b.len() < 2 || a[a.len() - 1] != b[b.len() - 2] {
            return None;
        }
        let mut made = broadcast(&[&a[..a.len() - 2], &b[..b.len() - 2]])?;
        made.extend([a[a.len() - 2], b[b.len() - 1]]);
        let place = |value: &Value, dims: &[usize]| value.tokens.map(|at| made.len() - dims.len() + at);
        let (of_left, of_right) = (place(left, a), place(right, b));
        let summed = of_left == Some(made.len() - 1) || of_right == Some(made.len() - 2);
        let mixes = summed || (of_left.is_some() && of_right.is_some() && of_left != of_right);
        Some(Made::one(Value::shaped(&made, of_left.or(of_right))).issue_if(mixes, MIXES))
    }

    fn gemm(&self) -> Option<Made> {
        let (left, right) = (self.input(0)?, self.input(1)?);
        let (&[rows, _], &[inner, outer]) = (left.dims.as_deref()?, right.dims.as_deref()?) else { return None };
        let columns = if self.node.int("transB", 0) != 0 { inner } else { outer };
        if self.node.int("transA", 0) != 0 || right.tokens.is_some() {
            return None;
        }
        let value = Value::shaped(&[rows, columns], left.tokens);
        Some(Made::one(value).issue_if(left.tokens == Some(1), MIXES))
    }

    /// A product with weights of another form, which has so many columns.
    fn wide(&self, columns: i64) -> Option<Made> {
        let value = self.input(0)?;
        let mut dims = value.dims.clone()?;
        *dims.last_mut()? = columns.try_into().ok()?;
        Some(Made::one(Value::shaped(&dims, value.tokens)).issue_if(self.ends_with_tokens(0), MIXES))
    }

    fn attention(&self) -> Option<Made> {
        let (query, value) = (self.dims(0)?, self.dims(2)?);
        let mut made = query.to_vec();
        let heads = |name: &str| usize::try_from(self.node.int(name, 0)).ok().filter(|&heads| heads > 0);
        *made.last_mut()? = match (query, value) {
            ([_, _, _], [_, _, width]) => width / heads("kv_num_heads")? * heads("q_num_heads")?,
            ([_, _, _, _], [_, _, _, width]) => *width,
            _ => return None,
        };
        Some(Made::one(Value::shaped(&made, Some(made.len() - 2))).issue("attends without pages"))
    }

    fn group_query(&self) -> Option<Made> {
        let mut made = self.dims(0)?.to_vec();
        if self.input(1).is_none() {
            let heads = |name: &str| usize::try_from(self.node.int(name, 0)).ok();
            let (heads, kv_heads) = (heads("num_heads")?, heads("kv_num_heads")?);
            *made.last_mut()? = (made.last()? * heads).checked_div(heads + 2 * kv_heads)?;
        }
        Some(Made::one(Value::shaped(&made, Some(1))).issue("attends without pages"))
    }

    /// All tokens of a call have one scale: that is what this operator does in any batch.
    fn dynamic_quantize(&self) -> Option<Made> {
        let scalar = Value::shaped(&[], None);
        Some(Made { values: vec![self.like(0)?, scalar.clone(), scalar], issue: None })
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

/// An axis, which may count from the end.
fn axis(at: i64, rank: usize) -> Option<usize> {
    let at = if at < 0 { at + rank as i64 } else { at };
    usize::try_from(at).ok().filter(|&at| at < rank)
}

fn sizes(numbers: &[i64]) -> Option<Vec<usize>> {
    numbers.iter().map(|&number| number.try_into().ok()).collect()
}

#[derive(Clone, Copy)]
enum Function {
    One(fn(f64) -> f64),
    /// Of the first two inputs, then of that and the third.
    Two(fn(f64, f64) -> f64),
    Where,
}

const TRUTHS: [&str; 9] = ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not"];

/// Operators whose numbers are computed.
const FUNCTIONS: [(&str, Function); 34] = [
    ("Identity", Function::One(|x| x)),
    ("Neg", Function::One(|x| -x)),
    ("Abs", Function::One(f64::abs)),
    ("Sqrt", Function::One(f64::sqrt)),
    ("Exp", Function::One(f64::exp)),
    ("Log", Function::One(f64::ln)),
    ("Reciprocal", Function::One(|x| 1.0 / x)),
    ("Floor", Function::One(f64::floor)),
    ("Ceil", Function::One(f64::ceil)),
    ("Tanh", Function::One(f64::tanh)),
    ("Cos", Function::One(f64::cos)),
    ("Sin", Function::One(f64::sin)),
    ("Relu", Function::One(|x| x.max(0.0))),
    ("Sign", Function::One(|x| if x == 0.0 { 0.0 } else { x.signum() })),
    ("IsNaN", Function::One(|x| f64::from(x.is_nan()))),
    ("IsInf", Function::One(|x| f64::from(x.is_infinite()))),
    ("Not", Function::One(|x| f64::from(x == 0.0))),
    ("Add", Function::Two(|x, y| x + y)),
    ("Sum", Function::Two(|x, y| x + y)),
    ("Sub", Function::Two(|x, y| x - y)),
    ("Mul", Function::Two(|x, y| x * y)),
    ("Div", Function::Two(|x, y| x / y)),
    ("Pow", Function::Two(f64::powf)),
    ("Mod", Function::Two(f64::rem_euclid)),
    ("Min", Function::Two(f64::min)),
    ("Max", Function::Two(f64::max)),
    ("Equal", Function::Two(|x, y| f64::from(x == y))),
    ("Less", Function::Two(|x, y| f64::from(x < y))),
    ("LessOrEqual", Function::Two(|x, y| f64::from(x <= y))),
    ("Greater", Function::Two(|x, y| f64::from(x > y))),
    ("GreaterOrEqual", Function::Two(|x, y| f64::from(x >= y))),
    ("And", Function::Two(|x, y| f64::from(x != 0.0 && y != 0.0))),
    ("Or", Function::Two(|x, y| f64::from(x != 0.0 || y != 0.0))),
    ("Where", Function::Where),
];

/// Operators that work on each number alone, too, whose numbers are not needed.
const OTHERS: [&str; 14] = [
    "Sigmoid",
    "Erf",
    "Gelu",
    "Softplus",
    "Softsign",
    "Elu",
    "Selu",
    "LeakyRelu",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Swish",
    "Clip",
    "PRelu",
];

#[cfg(test)]
mod tests {
    use super::super::proto::AttributeProto;
    use super::*;

    fn ints(numbers: &[i64]) -> Value {
        Value::known(&[numbers.len()], numbers.iter().map(|&number| number as f64).collect(), true)
    }

    fn run_op(op: &str, inputs: &[&Value]) -> Made {
        let inputs: Vec<Option<&Value>> = inputs.iter().map(|&value| Some(value)).collect();
        run(&NodeProto::new(op, &[], &["made"]), &inputs)
    }

    /// The dimension of the tokens, if the operator keeps them apart.
    fn tokens(made: &Made) -> Result<Option<usize>, &str> {
        made.issue.as_deref().map_or(Ok(made.values[0].tokens), Err)
    }

    #[test]
    fn tokens_are_followed_through_shapes() {
        let rows = Value::shaped(&[1, 7, 64], Some(1));
        let heads = run_op("Reshape", &[&rows, &ints(&[0, 0, 4, -1])]);
        assert_eq!((tokens(&heads), heads.values[0].dims.as_deref()), (Ok(Some(1)), Some(&[1, 7, 4, 16][..])));
        let order = AttributeProto::ints("perm", &[0, 2, 1, 3]);
        let turned = run(&NodeProto::new("Transpose", &[], &["made"]).with(order), &[Some(&heads.values[0])]);
        assert_eq!(tokens(&turned), Ok(Some(2)));
        assert_eq!(tokens(&run_op("Reshape", &[&rows, &ints(&[-1, 64])])), Ok(Some(0)));
        assert_eq!(tokens(&run_op("Unsqueeze", &[&rows, &ints(&[0, -1])])), Ok(Some(2)));
        assert_eq!(tokens(&run_op("Reshape", &[&rows, &ints(&[1, -1])])), Err(MIXES));
        let last = run_op("Slice", &[&rows, &ints(&[-1]), &ints(&[i64::MAX]), &ints(&[1])]);
        assert_eq!(tokens(&last), Err(MIXES));
        assert_eq!(tokens(&run_op("Slice", &[&rows, &ints(&[0]), &ints(&[32]), &ints(&[2])])), Ok(Some(1)));
    }

    #[test]
    fn products_and_norms_work_on_each_token() {
        let (rows, weight) = (Value::shaped(&[1, 7, 64], Some(1)), Value::shaped(&[64, 32], None));
        assert_eq!(tokens(&run_op("MatMul", &[&rows, &weight])), Ok(Some(1)));
        let columns = Value::shaped(&[1, 64, 7], Some(2));
        assert_eq!(tokens(&run_op("MatMul", &[&rows, &columns])), Err(MIXES));
        assert_eq!(tokens(&run_op("MatMul", &[&weight, &Value::shaped(&[1, 32, 7], Some(2))])), Ok(Some(2)));
        assert_eq!(tokens(&run_op("Softmax", &[&rows])), Ok(Some(1)));
        assert_eq!(tokens(&run_op("Softmax", &[&columns])), Err(MIXES));
        assert_eq!(tokens(&run_op("ReduceMean", &[&rows, &ints(&[-1])])), Ok(Some(1)));
        assert_eq!(tokens(&run_op("ReduceMean", &[&rows, &ints(&[1])])), Err(MIXES));
        assert_eq!(tokens(&run_op("Add", &[&rows, &Value::shaped(&[7, 1, 64], Some(0))])), Err(MIXES));
    }

    #[test]
    fn what_counts_tokens_has_an_issue() {
        let rows = Value::shaped(&[1, 7, 64], Some(1));
        let shape = run_op("Shape", &[&rows]).values.remove(0);
        let scalar = |number: f64| Value::known(&[], vec![number], true);
        let count = run_op("Gather", &[&shape, &scalar(1.0)]).values.remove(0);
        assert_eq!(count.single(), Some(7.0));
        let range = run_op("Range", &[&scalar(0.0), &count, &scalar(1.0)]);
        assert_eq!((tokens(&range), range.values[0].ints().map(|it| it.len())), (Err(COUNTS), Some(7)));
        assert_eq!(tokens(&run_op("Mul", &[&rows, &count])), Err(COUNTS));
        assert_eq!(tokens(&run_op("CumSum", &[&rows, &scalar(1.0)])), Err(COUNTS));
    }

    #[test]
    fn masks_are_computed() {
        let (column, row) = (ints(&[0, 1, 2]), Value::known(&[2, 1], vec![1.0, 2.0], true));
        let seen = run_op("LessOrEqual", &[&column, &row]).values.remove(0);
        assert_eq!(seen.ints(), Some(vec![1, 1, 0, 1, 1, 1]));
        let [zero, hidden] = [0.0, f64::NEG_INFINITY].map(|number| Value::known(&[1], vec![number], false));
        let added = run_op("Where", &[&seen, &zero, &hidden]).values.remove(0);
        assert_eq!(added.numbers.as_deref(), Some(&[0.0, 0.0, f64::NEG_INFINITY, 0.0, 0.0, 0.0][..]));
        let sums = run_op("CumSum", &[&ints(&[1, 1, 1]), &Value::known(&[], vec![0.0], true)]);
        assert_eq!(sums.values[0].ints(), Some(vec![1, 2, 3]));
        let joined = run_op("ReduceSum", &[&ints(&[1, 1, 1]), &ints(&[0])]).values.remove(0);
        assert_eq!(joined.ints(), Some(vec![3]));
    }

    #[test]
    fn unknown_operators_have_an_issue_and_no_shape() {
        let rows = Value::shaped(&[1, 7, 64], Some(1));
        let made = run_op("Convolve", &[&rows]);
        assert_eq!((made.issue.as_deref(), made.values[0].dims.as_ref()), (Some(UNKNOWN), None));
        // What follows is not at fault.
        assert_eq!(run_op("MatMul", &[&made.values[0], &rows]).issue, None);
        assert_eq!(run_op("Gather", &[&ints(&[1, 2]), &ints(&[5])]).issue.as_deref(), Some(UNKNOWN));
    }
}
