//! Numbers by which the keys and values of a trial are known again, after they were turned, repeated and scaled.

use super::super::value::{Value, each_place};

/// What a code stands for.
pub(super) const KEY: usize = 0;
pub(super) const VALUE: usize = 1;

pub(super) struct Codes {
    pub(super) kv_heads: usize,
    pub(super) head_size: usize,
    /// Tokens, past and new.
    pub(super) total: usize,
}

impl Codes {
    /// All keys, or values, of a layer, `[1, kv_heads, total, head_size]`. No number is 0, and each is there once in all layers.
    pub(super) fn value(&self, layer: usize, kind: usize) -> Value {
        let dims = [1, self.kv_heads, self.total, self.head_size];
        let first = self.first(layer, kind);
        let numbers = (0..dims.iter().product::<usize>()).map(|at| (first + at) as f64).collect();
        Value { of_past: true, ..Value::known(&dims, numbers, false) }
    }

    fn first(&self, layer: usize, kind: usize) -> usize {
        (2 * layer + kind) * self.kv_heads * self.total * self.head_size + 1
    }

    /// Whose numbers these are, if they are not scaled.
    pub(super) fn layer_of(&self, value: &Value) -> Option<(usize, usize)> {
        let first = *value.numbers.as_ref()?.first()?;
        if first < 1.0 || first.fract() != 0.0 || value.whole {
            return None;
        }
        let group = (first as usize - 1) / (self.kv_heads * self.total * self.head_size);
        Some((group / 2, group % 2))
    }

    /// What the numbers of a layer were multiplied by, if these are all of them, repeated for each query head of a group: `[1, heads,
    /// total, head_size]`, or with the last two dimensions turned. Heads may be as many as those of keys, where that is one.
    pub(super) fn factor(
        &self,
        value: &Value,
        (layer, kind): (usize, usize),
        heads: usize,
        turned: bool,
    ) -> Option<f64> {
        let (dims, numbers) = (value.dims.as_deref()?, value.numbers.as_deref()?);
        let &[1, found, rows, columns] = dims else { return None };
        let (tokens, width) = if turned { (columns, rows) } else { (rows, columns) };
        let alone = self.kv_heads == 1 && found == 1;
        if (found != heads && !alone)
            || !heads.is_multiple_of(self.kv_heads)
            || (tokens, width) != (self.total, self.head_size)
        {
            return None;
        }
        let (first, group) = (self.first(layer, kind), heads / self.kv_heads);
        let factor = numbers.first()? / first as f64;
        let (mut at, mut agrees) = (0, true);
        each_place(dims, |place| {
            let (token, number) = if turned { (place[3], place[2]) } else { (place[2], place[3]) };
            let head = if alone { 0 } else { place[1] / group };
            let code = first + (head * self.total + token) * self.head_size + number;
            agrees &= (numbers[at] - factor * code as f64).abs() <= 1e-9 * code as f64 * factor.abs();
            at += 1;
        });
        (agrees && factor > 0.0).then_some(factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODES: Codes = Codes { kv_heads: 2, head_size: 3, total: 5 };

    /// Values of layer 1 for four query heads, head `from(h)` for head h.
    fn repeated(from: fn(usize) -> usize) -> Value {
        let one = CODES.value(1, VALUE);
        one.picked(&[1, 4, 5, 3], |place| (from(place[1]) * 5 + place[2]) * 3 + place[3])
    }

    #[test]
    fn repeated_heads_are_known_again() {
        let value = repeated(|head| head / 2);
        assert_eq!(CODES.layer_of(&value), Some((1, VALUE)));
        assert_eq!(CODES.factor(&value, (1, VALUE), 4, false), Some(1.0));
        assert_eq!(CODES.factor(&value, (1, KEY), 4, false), None);
        assert_eq!(CODES.factor(&value, (0, VALUE), 4, false), None);
        // Query heads that read their keys in turn.
        assert_eq!(CODES.factor(&repeated(|head| head % 2), (1, VALUE), 4, false), None);
        assert_eq!(CODES.factor(&value, (1, VALUE), 6, false), None);
    }
}
