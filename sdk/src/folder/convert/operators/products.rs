//! Products, norms and attention: of each token alone, where tokens are not what they add up.

use super::super::value::{Value, broadcast};
use super::call::{Call, MIXES, Made};

impl Call<'_> {
    pub(super) fn along_axis(&self, absent: i64) -> Option<Made> {
        let value = self.like(0)?;
        let mixes = value.tokens == self.axis(absent, value.rank()?);
        Some(Made::one(value).issue_if(mixes, MIXES))
    }

    pub(super) fn norm(&self) -> Option<Made> {
        let value = self.like(0)?;
        let first = self.axis(-1, value.rank()?)?;
        let mixes = value.tokens.is_some_and(|at| at >= first);
        Some(Made::one(value).issue_if(mixes, MIXES))
    }

    pub(super) fn mat_mul(&self) -> Option<Made> {
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

    pub(super) fn gemm(&self) -> Option<Made> {
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
    pub(super) fn wide(&self, columns: i64) -> Option<Made> {
        let value = self.input(0)?;
        let mut dims = value.dims.clone()?;
        *dims.last_mut()? = columns.try_into().ok()?;
        Some(Made::one(Value::shaped(&dims, value.tokens)).issue_if(self.ends_with_tokens(0), MIXES))
    }

    pub(super) fn attention(&self) -> Option<Made> {
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

    pub(super) fn group_query(&self) -> Option<Made> {
        let mut made = self.dims(0)?.to_vec();
        if self.input(1).is_none() {
            let heads = |name: &str| usize::try_from(self.node.int(name, 0)).ok();
            let (heads, kv_heads) = (heads("num_heads")?, heads("kv_num_heads")?);
            *made.last_mut()? = (made.last()? * heads).checked_div(heads + 2 * kv_heads)?;
        }
        Some(Made::one(Value::shaped(&made, Some(1))).issue("attends without pages"))
    }

    /// All tokens of a call have one scale: that is what this operator does in any batch.
    pub(super) fn dynamic_quantize(&self) -> Option<Made> {
        let scalar = Value::shaped(&[], None);
        Some(Made { values: vec![self.like(0)?, scalar.clone(), scalar], issue: None })
    }
}
