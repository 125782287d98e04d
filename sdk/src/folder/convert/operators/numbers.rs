//! Operators that compute numbers: one by one, or along an axis.

use super::super::value::{Value, broadcast, combined, each_place, is_float, strides};
use super::call::{COUNTS, Call, MIXES, Made, axis};
use crate::tensor::ElementType;

impl Call<'_> {
    /// An operator that combines numbers of the same place.
    pub(super) fn by_number(&self) -> Option<Made> {
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

    pub(super) fn trilu(&self) -> Option<Made> {
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

    pub(super) fn cum_sum(&self) -> Option<Made> {
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

    pub(super) fn reduced(&self, function: Option<fn(&[f64]) -> f64>) -> Option<Made> {
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
