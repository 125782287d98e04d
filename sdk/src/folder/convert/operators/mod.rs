//! What operators make of what is known of their inputs: shapes, where tokens are, and small numbers. An operator that works on each
//! token alone may stay in a graph of pages; others have an issue.

mod call;
mod numbers;
mod products;
mod shapes;

use super::proto::NodeProto;
use super::value::Value;
pub(in crate::folder::convert) use call::Made;
use call::{Call, MIXES};

const UNKNOWN: &str = "is not known to work on each token alone";

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

impl Call<'_> {
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
}

#[cfg(test)]
mod tests {
    use super::super::proto::AttributeProto;
    use super::call::COUNTS;
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
